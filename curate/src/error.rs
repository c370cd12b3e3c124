//! Errors of curation.

use std::path::{Path, PathBuf};

use eval::EvalError;
use pipeline::PipelineError;
use prep::PrepError;
use ranks::EngineError;
use safetensors::SafeTensorError;

/// An error of curation. Variants name the file, image or column they are about.
#[derive(Debug, thiserror::Error)]
pub enum CurateError {
    /// The ranks cannot communicate.
    #[error(transparent)]
    Ranks(#[from] EngineError),
    /// Other ranks have failed, and have reported the reason themselves.
    #[error("{n_ranks} of the other ranks cannot continue; see their messages")]
    PeersFailed {
        /// Number of these ranks.
        n_ranks: usize,
    },
    /// The length of a part is no multiple of the width.
    #[error("{n_numbers} numbers are not rows of {width}")]
    Shape {
        /// Numbers of the part.
        n_numbers: usize,
        /// Columns of a row.
        width: usize,
    },
    /// A row holds NaN or infinity, or numbers whose squares overflow.
    #[error("row {row} of the features is not finite, or too large to be squared")]
    NotFinite {
        /// Index of the row.
        row: usize,
    },
    /// There are fewer rows than clusters.
    #[error("{n_clusters} clusters for {n_rows} rows: a cluster needs at least one row")]
    TooManyClusters {
        /// Clusters asked for.
        n_clusters: usize,
        /// Rows to be divided.
        n_rows: usize,
    },
    /// No number of clusters was given, or one is zero.
    #[error("clusters: expected one positive number per level, the lowest level first")]
    NoClusters,
    /// A level has no fewer clusters than the one below it.
    #[error(
        "level {level} has {n_clusters} clusters for {n_below} clusters: a level needs fewer than the \
         level below it"
    )]
    Levels {
        /// Number of the level, counted from 1.
        level: usize,
        /// Clusters asked for.
        n_clusters: usize,
        /// Clusters of the level below it.
        n_below: usize,
    },
    /// A setting of clusters has another number of values than there are levels.
    #[error("--{name} has {n_values} numbers for {n_levels} levels: pass one per level")]
    LevelValues {
        /// The setting.
        name: &'static str,
        /// Values given.
        n_values: usize,
        /// Levels of clusters.
        n_levels: usize,
    },
    /// Clusters need more memory than may be used.
    #[error(
        "{n_clusters} clusters of {n_rows} rows of width {width} need about {needed_gb:.1} GB of memory, but \
         only {limit_gb:.1} GB may be used: use fewer clusters, and split them with --splits"
    )]
    Memory {
        /// Clusters of the largest level.
        n_clusters: usize,
        /// Rows to be divided.
        n_rows: usize,
        /// Columns of a row.
        width: usize,
        /// Memory that the clusters need, in GB.
        needed_gb: f64,
        /// Memory that may be used, in GB.
        limit_gb: f64,
    },
    /// A file of clusters cannot be read.
    #[error(
        "{} is damaged, from an older release, or not a cluster file: remove it and cluster again",
        path.display()
    )]
    DamagedClusters {
        /// The file.
        path: PathBuf,
        /// The cause, unless it is the contents.
        source: Option<SafeTensorError>,
    },
    /// A file has clusters of other features, or by another distance.
    #[error("{} has {reason}", path.display())]
    OtherClusters {
        /// The file.
        path: PathBuf,
        /// Description of the difference.
        reason: String,
    },
    /// Two sets of features have rows of different widths.
    #[error(
        "rows of {width} cannot be compared with rows of {other}: the features come from different networks"
    )]
    Widths {
        /// Columns of the rows.
        width: usize,
        /// Columns of the other rows.
        other: usize,
    },
    /// Two sets of features cannot be compared.
    #[error("the features to compare were computed with different {what}")]
    OtherComputation {
        /// What differs.
        what: &'static str,
    },
    /// No file of features was given.
    #[error("--features matches no file")]
    NoFeatures,
    /// Files of one set have rows of different widths.
    #[error("{} has rows of width {width}, but {} has {other}", path.display(), first.display())]
    FileWidths {
        /// The file.
        path: PathBuf,
        /// Columns of its rows.
        width: usize,
        /// The first file.
        first: PathBuf,
        /// Columns of the rows of the first file.
        other: usize,
    },
    /// Files of one set were computed in different ways.
    #[error("{} and {} were computed with different {what}", path.display(), first.display())]
    FileComputation {
        /// The file.
        path: PathBuf,
        /// The first file.
        first: PathBuf,
        /// What differs.
        what: &'static str,
    },
    /// There are more rows than can be numbered.
    #[error("{n_rows} feature rows: at most 2^32 can be curated at once")]
    TooManyRows {
        /// Number of the rows.
        n_rows: usize,
    },
    /// The image of a row is not among the images.
    #[error(
        "--shards {shards}: feature row {row} belongs to {image}, which is not among the images: these are \
         features of other images"
    )]
    UnknownImage {
        /// Shards and folders of the images, without secrets.
        shards: String,
        /// Index of the row.
        row: usize,
        /// Key of the image, with its shard.
        image: String,
    },
    /// Several images have the name of the image of a row.
    #[error(
        "--shards {shards}: feature row {row} belongs to {image}, but {n_images} of the images have that \
         name: name the shards as they were named when the features were computed"
    )]
    AmbiguousImage {
        /// Shards and folders of the images, without secrets.
        shards: String,
        /// Index of the row.
        row: usize,
        /// Key of the image, with its shard.
        image: String,
        /// Number of images with that name.
        n_images: usize,
    },
    /// Images are to be packed that are not known.
    #[error("--pack needs --shards")]
    PackWithoutImages,
    /// There are no images to pack.
    #[error("no images are kept")]
    NothingKept,
    /// A file of the user has the name of a result.
    #[error(
        "{}: refusing to overwrite {name}, which ocelli did not write; choose another --out", folder.display()
    )]
    UserFile {
        /// The output folder.
        folder: PathBuf,
        /// Name of the file.
        name: &'static str,
    },
    /// Groups by a column need a list that has it.
    #[error("--by {column} needs --list; only `class` works without it")]
    NoList {
        /// The column.
        column: String,
    },
    /// The column of groups is empty.
    #[error("no image has a value in column {column}")]
    NoGroups {
        /// The column.
        column: String,
    },
    /// A list of kept images names none of the images.
    #[error("{} lists none of these images", path.display())]
    NoneListed {
        /// The list.
        path: PathBuf,
    },
    /// The level to be drawn does not exist.
    #[error("--level {level}: there are only {n_levels} levels of clusters")]
    NoLevel {
        /// Number of the level, counted from 1.
        level: usize,
        /// Levels of clusters.
        n_levels: usize,
    },
    /// A file could not be read, written or removed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// Operation that failed, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// Features cannot be read.
    #[error(transparent)]
    Eval(#[from] EvalError),
    /// A list, a folder or shards cannot be used.
    #[error(transparent)]
    Prep(#[from] PrepError),
    /// The data path failed.
    #[error(transparent)]
    Data(#[from] PipelineError),
}

impl CurateError {
    /// Creates an I/O error on `path` during `action`.
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }
}
