//! Errors of reading and writing weights.

use std::path::{Path, PathBuf};

use networks::NetworkError;

/// An error of reading or writing weights. Variants name the file.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// Attempted action, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A file does not have the format that its name implies.
    #[error("{} cannot be read: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Description of the defect.
        reason: String,
    },
    /// A file holds weights of a network that cannot be built here.
    #[error("{} cannot be used: {reason}", path.display())]
    Unknown {
        /// The file.
        path: PathBuf,
        /// Description of the network or file that was found.
        reason: String,
    },
    /// A format cannot hold this network.
    #[error("{format} cannot hold this network: {reason}")]
    Unsupported {
        /// The format.
        format: &'static str,
        /// Reason that the format cannot hold the network.
        reason: String,
    },
    /// The file or folder to be written exists.
    #[error("{} already exists; --overwrite replaces it", path.display())]
    Exists {
        /// The file or folder.
        path: PathBuf,
    },
    /// A network could not be built.
    #[error(transparent)]
    Network(#[from] NetworkError),
}

impl WeightsError {
    /// Returns an I/O error on `path` while doing `action`.
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }

    /// Returns an error that calls `path` malformed because of `reason`.
    pub(crate) fn malformed(path: &Path, reason: impl Into<String>) -> Self {
        Self::Malformed { path: path.to_path_buf(), reason: reason.into() }
    }

    /// Returns an error that calls the network in `path` unknown because of `reason`.
    pub(crate) fn unknown(path: &Path, reason: impl Into<String>) -> Self {
        Self::Unknown { path: path.to_path_buf(), reason: reason.into() }
    }
}
