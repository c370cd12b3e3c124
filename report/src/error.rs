//! Errors of reports.

use std::path::{Path, PathBuf};

use eval::EvalError;
use trainer::TrainError;

/// An error of a report.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// There is no run, or none that this program can read.
    #[error(transparent)]
    Run(Box<TrainError>),
    /// Images cannot be read, or features cannot be computed.
    #[error(transparent)]
    Eval(#[from] EvalError),
    /// A file of a run cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause of the failure.
        source: std::io::Error,
    },
    /// A picture cannot be drawn.
    #[error("cannot draw {}: {reason}", path.display())]
    Picture {
        /// The file.
        path: PathBuf,
        /// Reason for the failure.
        reason: String,
    },
    /// A picture could not be encoded.
    #[error("cannot encode a picture: {0}")]
    Encode(String),
}

impl ReportError {
    /// Creates the error of a picture that cannot be drawn into `path`.
    pub(crate) fn picture(path: &Path, reason: String) -> Self {
        Self::Picture { path: path.to_path_buf(), reason }
    }
}

impl From<TrainError> for ReportError {
    fn from(error: TrainError) -> Self {
        Self::Run(Box::new(error))
    }
}
