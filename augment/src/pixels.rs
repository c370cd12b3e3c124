//! Decoded images, and rules for decoding them.

use serde::{Deserialize, Serialize};

use crate::AugmentError;
use crate::format::PixelFormat;
use crate::values::NoData;

/// 8-bit RGB, rows from the top, three bytes per pixel.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rgb8 {
    /// Number of pixels per row.
    pub width_px: u32,
    /// Number of rows.
    pub height_px: u32,
    /// Pixels, `3 · width · height` bytes.
    pub data: Vec<u8>,
}

/// Limits and options of the decoder.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeRules {
    /// Maximum number of pixels of three channels, and of others in proportion; larger images are
    /// refused from their header, before anything is allocated.
    pub max_pixels: u64,
    /// `true` if EXIF orientation is applied.
    pub apply_exif: bool,
    /// Color behind transparent pixels; without one, alpha is dropped, as Pillow's `convert("RGB")`
    /// does.
    pub background: Option<[u8; 3]>,
    /// Format of the pixels that are decoded.
    pub format: PixelFormat,
    /// Bits that the values of 16-bit images use, 1 to 15, if not all: they are scaled as if they
    /// used all.
    pub bits_used: Option<u8>,
    /// Pixels that stand for no data, of other formats than 8-bit RGB; without it, NaN is an error.
    pub no_data: Option<NoData>,
}

/// Options of the decoder that change pixels. They are stored with weights that are exported to
/// other programs.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Decoding {
    /// See [`DecodeRules::apply_exif`].
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub apply_exif: bool,
    /// See [`DecodeRules::background`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub background: Option<[u8; 3]>,
    /// See [`DecodeRules::bits_used`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bits_used: Option<u8>,
    /// See [`DecodeRules::no_data`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_data: Option<NoData>,
}

impl Decoding {
    /// Returns the rules for images of `format` with the usual limit of pixels.
    pub fn rules(self, format: PixelFormat) -> DecodeRules {
        let Self { apply_exif, background, bits_used, no_data } = self;
        DecodeRules { apply_exif, background, format, bits_used, no_data, ..DecodeRules::default() }
    }
}

impl Default for DecodeRules {
    fn default() -> Self {
        // Pillow warns of a decompression bomb at 89 megapixels.
        Self {
            max_pixels: 89_478_485,
            apply_exif: false,
            background: None,
            format: PixelFormat::RGB8,
            bits_used: None,
            no_data: None,
        }
    }
}

impl Rgb8 {
    /// Creates an image from its pixels.
    ///
    /// # Panics
    /// Panics if `data` is not `3 · width · height` bytes.
    pub fn new(width_px: u32, height_px: u32, data: Vec<u8>) -> Self {
        assert_eq!(data.len(), 3 * width_px as usize * height_px as usize, "three bytes a pixel");
        Self { width_px, height_px, data }
    }
}

impl DecodeRules {
    /// Returns the options that change pixels.
    pub fn decoding(&self) -> Decoding {
        let Self { apply_exif, background, bits_used, no_data, .. } = *self;
        Decoding { apply_exif, background, bits_used, no_data }
    }

    /// Returns the maximum number of pixels of an image of this format, and so of a mask.
    pub fn max_image_pixels(&self) -> u64 {
        self.max_pixels.saturating_mul(3) / self.format.n_channels.max(1) as u64
    }

    /// Checks the dimensions that the header of an image states.
    pub(crate) fn check(&self, width_px: u32, height_px: u32) -> Result<(), AugmentError> {
        if u64::from(width_px) * u64::from(height_px) > self.max_pixels {
            return Err(AugmentError::TooManyPixels { width_px, height_px, max_pixels: self.max_pixels });
        }
        if width_px == 0 || height_px == 0 {
            return Err(AugmentError::Empty);
        }
        // No JPEG has longer sides, and the scratch memory of a resize grows with the sides, not
        // with the area.
        if width_px.max(height_px) > u32::from(u16::MAX) {
            return Err(AugmentError::Decode(format!("{width_px} x {height_px} px: a side exceeds 65535")));
        }
        Ok(())
    }
}
