//! Images of any number of channels, of 8 bits, 16 bits or floating point.
//!
//! ```text
//! files ─► values [C, H, W] in f32 ─► view [C, S, S] in f32 ─► bytes of the depth, each value rounded once
//! ```
//!
//! 32-bit floating point represents every whole number of 16 bits, so that no precision is lost
//! before the last rounding. 8-bit RGB is processed by [`crate::views`], whose views equal Pillow's
//! and torchvision's bit for bit. Code that uses views sees only bytes and a
//! [`crate::PixelFormat`].

mod blur;
mod color;
mod decode;
mod filter;
mod image;
mod layer;
mod map_data;
mod npy;
mod picture;
mod preview;
mod resize;
mod store;
mod tags;
mod tiff;
mod tiff_color;
mod views;

pub use decode::{SampleHeader, decode, exceeds_rgb8, format_of, largest_of_16_bits, sample_header};
pub use image::Bands;
pub use map_data::{MapData, map_data};
pub use preview::preview;

pub(crate) use resize::PlaneResizer;
pub(crate) use store::store;
pub(crate) use tiff_color::ColorPage;
pub(crate) use views::{BandViewMaker, rotate};
