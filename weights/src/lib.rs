//! Reading weights of other libraries, and writing networks as files for other libraries.
//!
//! Internally, parameters have timm's names for transformers and ConvNeXt, and torchvision's names
//! for other convolutional networks. [`backbone`] contains everything that depends on the kind of
//! backbone: one file or folder for each, and one line in its registry. [`source`] opens files and
//! folders, [`read`](mod@read) reads networks from them, [`write`](mod@write) creates files and
//! folders, and [`onnx`] builds graphs.
//!
//! Differences between libraries that change features are in the backbone's configuration, such as
//! the resampling of position embeddings (`pos_offset`, `pos_antialias`), the number that norms add
//! (`norm_epsilon`), registers and gated MLPs.

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

pub use backbone::resampling_note;
pub use error::WeightsError;
pub use export::{Card, Export, ExportedClassifier, HeadKind, Score};
pub use fingerprint::fingerprint;
pub use fitted::fitted;
pub use library::Library;
pub use precision::{Precision, rounded};
pub use preprocessing::Preprocessing;
pub use pretrained::{Hints, Pretrained};
pub use read::read;
pub use resized::resized;
pub use source::is_weights;
pub use write::{Format, check, write};
