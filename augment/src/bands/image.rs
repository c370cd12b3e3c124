//! Decoded image of any number of channels.

use crate::format::{Depth, PixelFormat};

/// An image of any number of channels.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Bands {
    /// Number of pixels per row.
    pub width_px: u32,
    /// Number of rows.
    pub height_px: u32,
    /// Type of the values in the file, which is also that of views.
    pub depth: Depth,
    /// Values of the file, `[C, H, W]`.
    pub values: Vec<f32>,
}

impl Bands {
    /// Creates an image of `width_px` from the bytes of a view in `format`, `[C, H, W]`.
    pub fn from_bytes(bytes: &[u8], format: PixelFormat, width_px: u32) -> Self {
        let values: Vec<f32> = match format.depth {
            Depth::Eight => bytes.iter().map(|byte| f32::from(*byte)).collect(),
            Depth::Sixteen => {
                bytes.as_chunks().0.iter().map(|pair| f32::from(u16::from_le_bytes(*pair))).collect()
            }
            Depth::Float => bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect(),
        };
        let height_px = values.len() / (format.n_channels * width_px as usize).max(1);
        Self { width_px, height_px: height_px as u32, depth: format.depth, values }
    }

    /// Returns the number of pixels of a channel.
    pub fn n_pixels(&self) -> usize {
        self.width_px as usize * self.height_px as usize
    }

    /// Returns the format of the pixels.
    pub fn format(&self) -> PixelFormat {
        PixelFormat { n_channels: self.values.len() / self.n_pixels().max(1), depth: self.depth }
    }

    /// Returns the channels, `[H, W]` each.
    pub fn channels(&self) -> impl Iterator<Item = &[f32]> {
        self.values.chunks_exact(self.n_pixels().max(1))
    }
}
