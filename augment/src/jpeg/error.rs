//! Errors of a JPEG.

use crate::AugmentError;

/// Reason why a JPEG cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum JpegError {
    /// The file ends early.
    #[error("the JPEG is cut off")]
    CutOff,
    /// A part of the file is invalid.
    #[error("the JPEG is damaged: {0}")]
    Damaged(&'static str),
    /// The file is valid, but of a kind that is not supported.
    #[error("the JPEG has {0}, which is not supported")]
    Unsupported(&'static str),
}

impl From<JpegError> for AugmentError {
    fn from(error: JpegError) -> Self {
        Self::Decode(error.to_string())
    }
}
