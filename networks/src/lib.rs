//! Networks: units, their parameters, backbones and heads, and a backbone with weights for
//! inference.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod adapter;
pub mod backbone;
pub mod batch_norm;
mod class_head;
pub mod divided;
pub mod draws;
mod error;
mod first_layer;
pub mod head;
mod inference;
pub mod init;
pub mod interpolation;
pub mod layout;
pub mod leaves;
pub mod mask;
mod origin;
pub mod outputs;
pub mod params;
pub mod part_name;
pub mod patches;
mod pixel_head;
pub mod probe;
mod readout;
pub mod safetensors;
pub mod sampler;
pub mod tensor;
pub mod tokens;
mod transformer;
pub mod unit;

pub use backbone::kinds::*;
pub use class_head::ClassHead;
pub use error::NetworkError;
pub use first_layer::FirstLayer;
pub use inference::{Network, inference_bytes};
pub use origin::Origin;
pub use patches::{Normalization, Pixels};
pub use pixel_head::{PixelHead, PixelScorer};
pub use tensor::NamedTensor;
