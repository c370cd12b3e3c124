//! What can be wrong with a JPEG.

use crate::AugmentError;

/// Why a JPEG cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum JpegError {
    /// The bytes end too early.
    #[error("the JPEG is cut off")]
    CutOff,
    /// A part of the file says what cannot be.
    #[error("the JPEG is damaged: {0}")]
    Damaged(&'static str),
    /// The file is whole, but of a kind that is not decoded.
    #[error("the JPEG has {0}, which is not supported")]
    Unsupported(&'static str),
}

impl From<JpegError> for AugmentError {
    fn from(error: JpegError) -> Self {
        Self::Decode(error.to_string())
    }
}
