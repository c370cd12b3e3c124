//! Reading weights of other libraries, and writing networks as files for other libraries.
//!
//! Inside, parameters have the names that timm has for transformers and ConvNeXt, and torchvision
//! for other convolutional networks. [`backbone`] has everything that depends on the kind of
//! backbone: one file or folder and one line for each. [`source`] opens files and folders,
//! [`read`](mod@read) makes a network of them, [`write`](mod@write) creates files and folders,
//! [`onnx`] builds graphs.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod backbone;
#[cfg(test)]
mod conformance;
mod decimal;
mod error;
mod export;
mod exported;
mod file;
mod fingerprint;
mod fitted;
mod library;
mod metadata;
mod named;
mod onnx;
mod precision;
mod preprocessing;
mod pretrained;
mod read;
mod resized;
mod source;
mod write;

pub use error::WeightsError;
pub use export::{Card, Export, Score};
pub use fingerprint::fingerprint;
pub use fitted::fitted;
pub use library::Library;
pub use precision::{Precision, rounded};
pub use preprocessing::Preprocessing;
pub use pretrained::{Hints, Pretrained};
pub use read::read;
pub use resized::resized;
pub use source::is_weights;
pub use write::{Format, write};
