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
    /// A file cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Cause of the failure.
        source: std::io::Error,
    },
    /// The record of what a tracking server has received is damaged.
    #[error("cannot read {}; delete it to send the whole run again: {source}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// Cause of the failure.
        source: serde_json::Error,
    },
    /// A tracking server does not respond.
    #[error("no response from {address}: {source}")]
    NoResponse {
        /// Address of the server.
        address: String,
        /// Cause of the failure.
        source: ureq::Error,
    },
    /// The response of a tracking server cannot be read.
    #[error(transparent)]
    Response(ureq::Error),
    /// A tracking server does not take a request.
    #[error("{address} returned {status} for {path}: {reason}")]
    Refused {
        /// Address of the server.
        address: String,
        /// Status of the response.
        status: String,
        /// Path of the request.
        path: String,
        /// Reason that the server gives.
        reason: String,
    },
    /// The response of a tracking server lacks an identity.
    #[error("the server's response has no {missing}")]
    Incomplete {
        /// What is missing.
        missing: &'static str,
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
