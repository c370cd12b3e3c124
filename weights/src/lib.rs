//! Weights of other libraries into networks, and networks into files for other libraries.
//!
//! Inside, parameters have the names that timm has for transformers and torchvision for convolutional networks.
//! [`library`] knows what other libraries call them, [`read`](mod@read) finds out what a file holds, [`write`](mod@write)
//! makes files and folders, [`onnx`] draws the network as a graph.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod error;
mod export;
mod file;
mod fingerprint;
mod fitted;
mod library;
mod metadata;
mod named;
mod onnx;
mod precision;
mod preprocessing;
mod read;
mod resized;
mod write;

pub use error::WeightsError;
pub use export::{Card, Export, Score};
pub use fingerprint::fingerprint;
pub use fitted::fitted;
pub use library::Library;
pub use precision::{Precision, rounded};
pub use preprocessing::Preprocessing;
pub use read::{Hints, Pretrained, is_weights, read};
pub use resized::resized;
pub use write::{Format, write};
