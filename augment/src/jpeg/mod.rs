//! JPEG, baseline and progressive, to the bytes that libjpeg-turbo gives Pillow.
//!
//! Crates decode to other bytes: `zune-jpeg` and `jpeg-decoder` have another inverse transform and another upsampling, and those
//! that follow libjpeg-turbo are C, which needs an assembler to be fast, or mostly `unsafe`.
//!
//! Damaged data is read as libjpeg reads it, but without the smoothing that hides the missing scans of a progressive image: where
//! an image cannot be decoded further, the rest stays gray. An image without its end marker, or of more than a hundred scans, is an
//! error.

mod bits;
mod coefficients;
mod decoder;
mod error;
mod header;
mod huffman;
mod idct;
mod layout;
mod rows;
mod segments;
mod standard;

pub(crate) use decoder::Decoder;
pub(crate) use header::header;

/// Bytes that begin every JPEG.
pub(crate) const MAGIC: [u8; 2] = [0xff, 0xd8];
