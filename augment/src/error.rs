//! Errors of decoding and augmentation.

use crate::crop::CropBox;
use crate::format::PixelFormat;

/// Error in making views of an image, or in a multi-crop.
#[derive(Debug, thiserror::Error)]
pub enum AugmentError {
    /// The bytes are not an image of a supported format, or are damaged.
    #[error("cannot decode: {0}")]
    Decode(String),
    /// The header announces more pixels than the limit.
    #[error("{width_px} x {height_px} pixels exceed the limit of {max_pixels}")]
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
    /// The pixels are not of the expected format.
    #[error("found {found}, expected {expected} (data.channels, data.bits)")]
    Format {
        /// Format of the pixels, in words.
        found: String,
        /// Format that was expected.
        expected: PixelFormat,
    },
    /// The files of a sample do not fit together.
    #[error("bands do not fit together: {0}")]
    Bands(String),
    /// The files of a sample are separate color images.
    #[error(
        "one sample has {n_files} color images: its key ends at the first dot of their names, so give them \
         names that differ before it (`ocelli shards pack` does)"
    )]
    ColorImages {
        /// Number of color images.
        n_files: usize,
    },
    /// The mask of an image is missing, damaged, or does not fit the image or the classes.
    #[error("the mask cannot be used: {0}")]
    Mask(String),
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

impl AugmentError {
    /// Creates the error for a box that is not inside an image of `source_px`, or whose part is not
    /// inside `size_px`.
    pub(crate) fn outside(crop: CropBox, source_px: [u32; 2], size_px: [u32; 2]) -> Self {
        let [from_width, from_height] = source_px;
        let [width_px, height_px] = size_px;
        Self::Resize(format!(
            "{crop:?} of an image of {from_width} x {from_height} to {width_px} x {height_px}"
        ))
    }
}
