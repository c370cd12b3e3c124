//! What can be wrong with weights.

use std::path::{Path, PathBuf};

use networks::NetworkError;

/// An error of reading or writing weights. Variants name the file.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was being done, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A file is not what its name says.
    #[error("{} cannot be read: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file holds weights of a network that cannot be built here.
    #[error("{} cannot be used: {reason}", path.display())]
    Unknown {
        /// The file.
        path: PathBuf,
        /// What was found.
        reason: String,
    },
    /// A format cannot hold this network.
    #[error("{format} cannot hold this network: {reason}")]
    Unsupported {
        /// The format.
        format: &'static str,
        /// Why.
        reason: String,
    },
    /// Something is in the way of what is to be written.
    #[error("{} exists; --overwrite replaces it", path.display())]
    Exists {
        /// The file or folder.
        path: PathBuf,
    },
    /// A network could not be built.
    #[error(transparent)]
    Network(#[from] NetworkError),
}

impl WeightsError {
    /// An I/O error on `path` while doing `action`.
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }

    /// `path` is malformed because of `reason`.
    pub(crate) fn malformed(path: &Path, reason: impl Into<String>) -> Self {
        Self::Malformed { path: path.to_path_buf(), reason: reason.into() }
    }

    /// `path` holds something else because of `reason`.
    pub(crate) fn unknown(path: &Path, reason: impl Into<String>) -> Self {
        Self::Unknown { path: path.to_path_buf(), reason: reason.into() }
    }
}
