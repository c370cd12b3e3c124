//! Images of any number of channels, of 8 bits, 16 bits or floating point.
//!
//! ```text
//! files ─► values [C, H, W] in f32 ─► view [C, S, S] in f32 ─► bytes of the depth, each value rounded once
//! ```
//!
//! 32-bit floating point holds every whole number of 16 bits, so that nothing is lost before the last rounding. 8-bit RGB does not
//! come here: its views equal Pillow's and torchvision's bit for bit ([`crate::views`]).

mod blur;
mod color;
mod decode;
mod filter;
mod map_data;
mod npy;
mod picture;
mod preview;
mod resize;
mod store;
mod tiff;
mod views;

use crate::format::{Depth, PixelFormat};

pub use decode::{Found, decode, format_of, found};
pub use map_data::{MapData, map_data};
pub use preview::preview;

pub(crate) use resize::PlaneResizer;
pub(crate) use store::store;
pub(crate) use views::{BandViewMaker, rotate};

/// An image of any number of channels.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Bands {
    /// Number of pixels per row.
    pub width_px: u32,
    /// Number of rows.
    pub height_px: u32,
    /// Type of the values in the file, in which views are stored.
    pub depth: Depth,
    /// Values, `[C, H, W]`, each as the file has it.
    pub values: Vec<f32>,
}

impl Bands {
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
