//! What can be wrong with an image.

/// An image that cannot become views.
#[derive(Debug, thiserror::Error)]
pub enum AugmentError {
    /// The bytes are no image of a known format, or a damaged one.
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
    /// A multi-crop that makes no sense.
    #[error("{field}: {reason}")]
    Recipe {
        /// Name of the value in the recipe.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
}
