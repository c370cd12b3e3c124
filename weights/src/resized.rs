//! Adapting a network to images of another size.

use networks::{ModelConfig, NamedTensor};

use crate::backbone::exchange_of;

/// Adapts `model` and its parameters to images of `px` pixels. The position embedding of a
/// transformer is resampled as the network would do it for such images, so that its features stay
/// the same.
pub fn resized(
    model: &ModelConfig,
    mut tensors: Vec<NamedTensor>,
    px: usize,
) -> (ModelConfig, Vec<NamedTensor>) {
    let adapted = exchange_of(model).resize(&mut tensors, px);
    (adapted.unwrap_or_else(|| model.clone()), tensors)
}
