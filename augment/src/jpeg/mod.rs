//! JPEG decoder, baseline and progressive, which yields the same bytes as Pillow with
//! libjpeg-turbo.
//!
//! Existing crates yield other bytes: `zune-jpeg` and `jpeg-decoder` use another inverse transform
//! and upsampling, which changes up to a sixth of the bytes and moved the features of photographs
//! by one percent; those that follow libjpeg-turbo are C, which needs an assembler to be fast, or
//! mostly `unsafe`.
//!
//! Damaged data is decoded as in libjpeg, but without the smoothing that hides missing scans of a
//! progressive image: if an image cannot be decoded further, the remaining pixels are gray. An
//! image without an end marker, or with more than a hundred scans, is an error.
//!
//! Arithmetic coding is not supported. Tests compare 380 files with stored bytes, and damaged
//! copies with Pillow where it is installed (`tests/it/jpeg.rs`).

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
pub(crate) use rows::light;

/// Bytes that begin every JPEG.
pub(crate) const MAGIC: [u8; 2] = [0xff, 0xd8];
