//! Errors of curation.

use ranks::EngineError;

/// An error of curation.
#[derive(Debug, thiserror::Error)]
pub enum CurateError {
    /// The ranks cannot communicate.
    #[error(transparent)]
    Ranks(#[from] EngineError),
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
        /// Number of the row, counted from 0.
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
}
