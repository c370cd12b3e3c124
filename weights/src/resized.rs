//! Networks for images of another size.

use networks::ModelConfig;
use networks::NamedTensor;

use crate::library::transformer::TIMM;

/// `model` and its parameters for images of `px` pixels: a transformer's position embedding is resampled as the network
/// would do it for such images, so that its features stay the same.
pub fn resized(model: &ModelConfig, tensors: Vec<NamedTensor>, px: usize) -> (ModelConfig, Vec<NamedTensor>) {
    let ModelConfig::Vit(config) = model else { return (model.clone(), tensors) };
    let resample = |tensor: NamedTensor| {
        if tensor.name != TIMM.pos_embed {
            return tensor;
        }
        let values = config.positions_for(&tensor.values, px);
        NamedTensor { shape: vec![1, values.len() / config.width, config.width], values, ..tensor }
    };
    let mut config = config.clone();
    let tensors = tensors.into_iter().map(resample).collect();
    config.image_px = px;
    (ModelConfig::Vit(config), tensors)
}
