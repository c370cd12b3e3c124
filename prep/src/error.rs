//! Errors about data sets.

use std::path::{Path, PathBuf};

use pipeline::PipelineError;

/// An error about a data set. Variants name the file, column or image they are about.
#[derive(Debug, thiserror::Error)]
pub enum PrepError {
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
    /// A line of a list is not a JSON object with the name of an image.
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
    #[error("{} is no regular file", path.display())]
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
    #[error("{} has no value in a column {column}", path.display())]
    EmptyColumn {
        /// The list.
        path: PathBuf,
        /// The column.
        column: String,
    },
    /// A list has several values for one image.
    #[error(
        "the list has several values for {key} in shards called {shard}: name the shards as the list does"
    )]
    SeveralValues {
        /// Key of the image.
        key: String,
        /// File name of the shards.
        shard: String,
    },
    /// The data path failed.
    #[error(transparent)]
    Data(#[from] PipelineError),
}

impl PrepError {
    /// Creates an I/O error on `path` during `action`.
    pub fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }
}
