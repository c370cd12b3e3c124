//! Augmented views of one encoded image under one seed.
//!
//! [`decode`] turns bytes into RGB, [`bands`] into images of other channels and depths,
//! [`multicrop`] specifies the views that a method takes of an image, [`mix`] varies their sizes
//! from batch to batch, [`views`] makes them, [`seed`] is the counter-based RNG that makes every
//! view a pure function of (run seed, epoch, sample, view, operation), and [`batch`] does all of it
//! on N threads and returns ordered batches, whose images [`mixing`] mixes in pairs. A [`Mask`] has
//! the classes of an image's pixels, and makes the masks of its views. Semantics are those of
//! torchvision on Pillow 12, operation by operation, and of timm for [`erase`] and [`mixing`].
//!
//! The crate does not depend on files, shards, tensors or training.
//!
//! Operations on 8-bit RGB use integers and single f32 operations without fused multiply-adds, so
//! that SSE2, AVX2 and AVX-512 give the same bytes.

pub mod bands;
pub(crate) mod batch;
pub mod blur;
mod coefficients;
pub mod color;
pub mod crop;
pub mod decode;
pub(crate) mod erase;
pub(crate) mod error;
pub mod facts;
pub(crate) mod format;
mod gif;
pub mod hue;
pub mod image;
mod jpeg;
mod mask;
pub(crate) mod mix;
pub(crate) mod mixing;
pub(crate) mod multicrop;
mod pairs;
mod pixels;
pub(crate) mod planes;
pub mod resize;
pub(crate) mod seed;
pub mod solarize;
pub mod stats;
mod transform;
mod values;
pub(crate) mod views;

/// Version of the views for given bytes and seeds: 2 since JPEG and blur equal Pillow's bit for
/// bit; 3 since GIF on a larger canvas and CMYK TIFF do.
pub const VIEWS_VERSION: u32 = 3;

pub use batch::{Batch, BatchPool, EncodedImage, PoolConfig, SoftLabel, Source};
pub use coefficients::Interpolation;
pub use erase::Erase;
pub use error::AugmentError;
pub use format::{Depth, MAX_CHANNELS, PixelFormat};
pub use image::Image;
pub use mask::{IGNORED_CLASS, Mask};
pub use mix::{SizeChoice, ViewMix};
pub use mixing::{Mixed, Mixing};
pub use multicrop::{BlurRule, CropSpec, GroupSpec, MultiCrop};
pub use pixels::{DecodeRules, Decoding, Rgb8};
pub use planes::Planes;
pub use seed::{SampleKey, ViewRng};
pub use transform::{Transform, squashed};
pub use values::{Fill, FillRule, NoData};
pub use views::{ViewMaker, ViewMasks, Views};
