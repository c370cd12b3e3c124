//! A decoded image, and what may become one.

use crate::AugmentError;

/// 8-bit RGB, rows from the top, three bytes a pixel.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rgb8 {
    /// Pixels of a row.
    pub width_px: u32,
    /// Rows.
    pub height_px: u32,
    /// `3 · width · height` bytes.
    pub data: Vec<u8>,
}

/// What the decoder accepts and applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeRules {
    /// Images with more pixels are refused by their header, before anything is allocated.
    pub max_pixels: u64,
    /// Whether EXIF orientation is applied.
    pub apply_exif: bool,
}

impl Default for DecodeRules {
    fn default() -> Self {
        // Pillow warns of a decompression bomb at 89 megapixels.
        Self { max_pixels: 89_478_485, apply_exif: false }
    }
}

impl Rgb8 {
    /// An image from its pixels.
    ///
    /// # Panics
    /// If `data` is not `3 · width · height` bytes.
    pub fn new(width_px: u32, height_px: u32, data: Vec<u8>) -> Self {
        assert_eq!(data.len(), 3 * width_px as usize * height_px as usize, "three bytes a pixel");
        Self { width_px, height_px, data }
    }
}

impl DecodeRules {
    /// Judges an image by its header.
    pub(crate) fn check(&self, width_px: u32, height_px: u32) -> Result<(), AugmentError> {
        if u64::from(width_px) * u64::from(height_px) > self.max_pixels {
            return Err(AugmentError::TooManyPixels { width_px, height_px, max_pixels: self.max_pixels });
        }
        if width_px == 0 || height_px == 0 {
            return Err(AugmentError::Empty);
        }
        // No JPEG is longer, and a resize takes scratch memory by the sides, not by the area.
        if width_px.max(height_px) > u32::from(u16::MAX) {
            return Err(AugmentError::Decode(format!("{width_px} x {height_px} px: a side exceeds 65535")));
        }
        Ok(())
    }
}
