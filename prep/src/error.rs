//! Errors about data sets.

use std::path::{Path, PathBuf};

use augment::AugmentError;
use image::ImageError;
use pipeline::PipelineError;
use pipeline::words::counted;

/// An error about a data set. Variants name the file, column or image they are about.
#[derive(Debug, thiserror::Error)]
pub enum PrepError {
    /// The folder of a run was given for a folder of images.
    #[error(
        "{} is the work directory of a run, whose pictures are no images to read: give the folder or the \
         shards of the images",
        path.display()
    )]
    WorkDirectory {
        /// The folder.
        path: PathBuf,
    },
    /// A file or folder could not be read.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// Operation that failed, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A folder could not be listed.
    #[error("cannot read folder {}: {source}", path.display())]
    Walk {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: walkdir::Error,
    },
    /// A table could not be read.
    #[error("in {}: {source}", path.display())]
    Table {
        /// The list.
        path: PathBuf,
        /// The cause.
        source: csv::Error,
    },
    /// An image has more classes than its class member may hold.
    #[error("an image has {n} classes, more than are read: name a column with fewer by --label-column")]
    TooManyClasses {
        /// Number of its classes.
        n: usize,
    },
    /// A line of a list is not a JSON object with the name of an image, or states classes that
    /// cannot be read.
    #[error("{}, line {line}: {reason}", path.display())]
    Line {
        /// The list.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// Description of the fault.
        reason: String,
    },
    /// The input does not exist.
    #[error("{} does not exist", path.display())]
    Missing {
        /// The input.
        path: PathBuf,
    },
    /// The input is neither a folder nor a list.
    #[error("{} is neither a folder nor a .txt, .csv, .tsv or .jsonl list", path.display())]
    NotImages {
        /// The input.
        path: PathBuf,
    },
    /// A list is a pipe or a device.
    #[error("{} is not a regular file", path.display())]
    NotRegular {
        /// The list.
        path: PathBuf,
    },
    /// A list lacks the column that was named.
    #[error("{} has no column `{column}`; it has {}", path.display(), columns.join(", "))]
    NoColumn {
        /// The list.
        path: PathBuf,
        /// The missing column.
        column: String,
        /// Columns of the list.
        columns: Vec<String>,
    },
    /// Nothing in a list names the images.
    #[error("{} has none of the columns {wanted}; it has {}{hint}", path.display(), columns.join(", "))]
    NoImageColumn {
        /// The list.
        path: PathBuf,
        /// Columns that would name images.
        wanted: String,
        /// Columns of the list.
        columns: Vec<String>,
        /// Advice to the user.
        hint: &'static str,
    },
    /// A column of a list is empty.
    #[error("{} has no values in its column {column}", path.display())]
    EmptyColumn {
        /// The list.
        path: PathBuf,
        /// The column.
        column: String,
    },
    /// A list has several values for one image.
    #[error(
        "the list has several values for {key} in shards named {shard}: give the shards the same paths as in \
         the list"
    )]
    SeveralValues {
        /// Key of the image.
        key: String,
        /// File name of the shards.
        shard: String,
    },
    /// A file of JSON is damaged.
    #[error("cannot read {}: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
    /// A result cannot be expressed in JSON.
    #[error(transparent)]
    Unserializable(serde_json::Error),
    /// An operation of the file system failed; the text is the system's.
    #[error("{source}")]
    FileSystem {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// Near copies may differ in more bits than is supported.
    #[error("a distance of {max_distance} bits is too large: expected at most {limit}")]
    TooDistant {
        /// The distance.
        max_distance: u32,
        /// Largest supported distance.
        limit: u32,
    },
    /// Another process writes into a folder.
    #[error("another job is writing to {}: wait for it, or choose another folder", path.display())]
    Busy {
        /// The folder, or the lock file of a part.
        path: PathBuf,
    },
    /// A job in parts would delete the results of parts.
    #[error("--overwrite would delete the results of parts: to start over, remove the folder")]
    OverwrittenParts,
    /// Results of parts do not exist.
    #[error("missing: {}; run {named} first", counted(*n_missing as u64, "part"))]
    MissingParts {
        /// Number of the missing parts.
        n_missing: usize,
        /// The first of them, as flags.
        named: String,
    },
    /// The result of a part is not what its file says.
    #[error("{} is damaged or from an earlier release: remove it and rerun part {part}", path.display())]
    DamagedPart {
        /// File of the result.
        path: PathBuf,
        /// The part, as K/N.
        part: String,
    },
    /// The result of a part belongs to another job or part.
    #[error(
        "{} belongs to another job or part, or its inputs have changed since: remove it and rerun the part, \
         or give the same inputs and flags", path.display()
    )]
    OtherPart {
        /// File of the result.
        path: PathBuf,
    },
    /// A job in parts has no folder for the results of parts.
    #[error("--part and --join need --out, the folder for the results of parts")]
    NoResultFolder,
    /// A whole job has a folder for the results of parts.
    #[error("--out is for the results of parts: also pass --part K/N or --join N")]
    ResultFolder,
    /// Results of parts name samples that the shards do not have.
    #[error("the parts in {} belong to other shards: remove them and rerun the parts", folder.display())]
    PartsOfOtherShards {
        /// Folder of the results.
        folder: PathBuf,
    },
    /// A folder of images is among the inputs of a job in parts.
    #[error(
        "{folder} is a folder of images, which cannot be divided into parts: pack it first, or run without \
         parts"
    )]
    UndividedFolder {
        /// The folder.
        folder: String,
    },
    /// A folder has the description of another job.
    #[error(
        "{} holds another job ({verb}), or the same job with other inputs, flags or number of parts; choose \
         another --out", out.display()
    )]
    OtherJob {
        /// The folder.
        out: PathBuf,
        /// Verb of the job in it.
        verb: String,
    },
    /// A folder has shards, and no description of their job.
    #[error("{} holds shards of another job; choose another --out", out.display())]
    OtherShards {
        /// The folder.
        out: PathBuf,
    },
    /// The shards of a prefix belong to another job.
    #[error(
        "{prefix}-*.tar in {} belong to another job, with other images, flags or parts: choose another --out \
         or --prefix, or remove these shards and {}", out.display(), mark.display()
    )]
    OtherPack {
        /// Prefix of the shards' names.
        prefix: String,
        /// Folder of the shards.
        out: PathBuf,
        /// Description of the job.
        mark: PathBuf,
    },
    /// Another job has begun to write shards with the same prefix.
    #[error("another job with the prefix {prefix} has just started in {}", out.display())]
    PackBegun {
        /// Prefix of the shards' names.
        prefix: String,
        /// Folder of the shards.
        out: PathBuf,
    },
    /// A shard to read is in the folder to write to.
    #[error("{} is in the output folder; choose another --out", path.display())]
    InOutput {
        /// The shard.
        path: PathBuf,
    },
    /// The output folder is in a folder whose images are read.
    #[error(
        "{} is in {}, all of whose images are read: choose an --out outside of it", out.display(),
        folder.display()
    )]
    OutputInFolder {
        /// The output folder.
        out: PathBuf,
        /// The folder of images.
        folder: PathBuf,
    },
    /// Copies in a folder of images are to be removed.
    #[error(
        "--remove writes shards anew, but {folder} is a folder of images: pack it first (ocelli shards pack \
         {folder} --out shards/), or leave out --remove: keep.txt lists the images to keep"
    )]
    CopiesInFolder {
        /// The folder.
        folder: String,
    },
    /// No sample of the set is in a preferred folder or shard.
    #[error("--prefer {spec}: no sample is in it; give a folder or a shard that is part of the set")]
    NoPreferred {
        /// The folder or shard, as it was given.
        spec: String,
    },
    /// Shards to read have the same name.
    #[error("two input shards are both named {shard}; use two folders")]
    SameNames {
        /// The second of them, without secrets.
        shard: String,
    },
    /// Two samples have the same key.
    #[error("key {key} occurs twice, the second time in {shard}; rename samples with --renumber")]
    RepeatedKey {
        /// The key.
        key: String,
        /// Shard of the second sample.
        shard: String,
    },
    /// A part of a split has no valid name or share.
    #[error("--part {part}: expected a name and a share above 0, such as train=0.9")]
    BadShare {
        /// The part, as it was given.
        part: String,
    },
    /// Two parts of a split have the same name.
    #[error("--part {name} is given twice")]
    RepeatedShare {
        /// The name.
        name: String,
    },
    /// The prefix of shards is not the name of a file.
    #[error("{name:?} is not a valid shard name")]
    BadPrefix {
        /// The prefix.
        name: String,
    },
    /// No sample is to be written.
    #[error("no samples were selected")]
    NoneSelected,
    /// Some of the wanted classes have no samples.
    #[error("some of the classes {wanted} have no samples; the shards have {seen}")]
    MissingClasses {
        /// Classes that were asked for.
        wanted: String,
        /// Some of the classes that exist.
        seen: String,
    },
    /// No sample has one of the wanted keys.
    #[error("none of the {n_keys} keys was found in {}", counted(*n_shards as u64, "shard"))]
    MissingKeys {
        /// Number of keys that were asked for.
        n_keys: usize,
        /// Number of shards that were searched.
        n_shards: usize,
    },
    /// A file to be written exists.
    #[error("{} exists; pass --overwrite or choose another --out", path.display())]
    FileExists {
        /// The file.
        path: PathBuf,
    },
    /// The input is not a list of addresses.
    #[error("{} is not a .txt, .csv, .tsv or .jsonl list of URLs", path.display())]
    NotUrls {
        /// The input.
        path: PathBuf,
    },
    /// A list of addresses is empty.
    #[error("{} contains no URLs", path.display())]
    NoUrls {
        /// The list.
        path: PathBuf,
    },
    /// The client for requests could not be started; the text is the system's.
    #[error(transparent)]
    Client(std::io::Error),
    /// Shards in different folders have different lists of classes.
    #[error(
        "{} and {} name classes differently: class {class} is {} in the first and {} in the second, and \
         classes are merged by number; pack both again with one list of all classes (--classes LIST), or \
         give them separately",
        first.display(),
        second.display(),
        first_name.as_deref().unwrap_or("not listed"),
        second_name.as_deref().unwrap_or("not listed")
    )]
    ClassLists {
        /// A list.
        first: PathBuf,
        /// Another list.
        second: PathBuf,
        /// First class that they name differently, counted from 0.
        class: usize,
        /// Name of the class in the first list, if it has one.
        first_name: Option<String>,
        /// Name of the class in the second list, if it has one.
        second_name: Option<String>,
    },
    /// A folder has another list of classes than the shards.
    #[error("{} lists other classes than {}; choose another --out", path.display(), list.display())]
    OtherClassList {
        /// List in the folder.
        path: PathBuf,
        /// List beside the shards.
        list: PathBuf,
    },
    /// A folder has another list of classes than the images.
    #[error(
        "{} lists other classes; use its numbering with --classes {}, or choose another --out",
        path.display(), path.display()
    )]
    OtherClasses {
        /// List in the folder.
        path: PathBuf,
    },
    /// A class is not in the list of classes.
    #[error("class {class:?} is not in the list of classes ({n_names} names)")]
    UnknownClass {
        /// The class.
        class: String,
        /// Number of names in the list.
        n_names: usize,
    },
    /// A class is not the number that it has to be.
    #[error("{source}")]
    NotNumber {
        /// The class.
        class: String,
        /// The cause.
        source: std::num::ParseIntError,
    },
    /// A file does not have the name of an image.
    #[error("{} does not have an image extension", path.display())]
    NoImageExtension {
        /// The file.
        path: PathBuf,
    },
    /// The header of an image cannot be read.
    #[error("{} is not a readable image: {source}", path.display())]
    NotReadable {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: AugmentError,
    },
    /// An image cannot be decoded.
    #[error("cannot decode {}: {source}", path.display())]
    Undecodable {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: AugmentError,
    },
    /// An image cannot be written as a PNG.
    #[error("cannot encode {}: {source}", path.display())]
    Unencodable {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: ImageError,
    },
    /// An image cannot be written as a JPEG.
    #[error(transparent)]
    Jpeg(ImageError),
    /// A mask cannot be written as a PNG.
    #[error(transparent)]
    Png(ImageError),
    /// The files of an image do not fit together.
    #[error(transparent)]
    Augment(#[from] AugmentError),
    /// The data path failed.
    #[error(transparent)]
    Data(#[from] PipelineError),
}

impl PrepError {
    /// Creates an I/O error on `path` during `action`.
    pub fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }

    /// Creates the error for the damaged JSON file `path`.
    pub(crate) fn json(path: &Path, source: serde_json::Error) -> Self {
        Self::Json { path: path.to_path_buf(), source }
    }

    /// Creates the error of the file system on `path`.
    pub(crate) fn file_system(path: &Path, source: std::io::Error) -> Self {
        Self::FileSystem { path: path.to_path_buf(), source }
    }
}
