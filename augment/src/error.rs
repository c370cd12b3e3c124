//! Errors of decoding and augmentation.

/// An error of making views of an image, or of a multi-crop.
#[derive(Debug, thiserror::Error)]
pub enum AugmentError {
    /// The bytes are not an image of a supported format, or are damaged.
    #[error("cannot decode: {0}")]
    Decode(String),
    /// The header announces more pixels than the limit.
    #[error("{width_px} x {height_px} pixels are more than the limit of {max_pixels}")]
    TooManyPixels {
        /// Width in the header.
        width_px: u32,
        /// Height in the header.
        height_px: u32,
        /// The limit.
        max_pixels: u64,
    },
    /// The image has no pixels.
    #[error("the image is empty")]
    Empty,
    /// Resizing failed.
    #[error("cannot resize: {0}")]
    Resize(String),
    /// A value of a multi-crop is invalid.
    #[error("{field}: {reason}")]
    Recipe {
        /// Name of the value in the recipe.
        field: String,
        /// Reason why it is invalid.
        reason: String,
    },
}
