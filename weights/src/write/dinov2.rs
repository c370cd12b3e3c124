//! State dictionaries of DINOv2's networks.

use networks::{MlpKind, ModelConfig};

use super::renamed::renamed;
use super::timm::check_epsilon;
use crate::export::Export;
use crate::file::{Array, Arrays};
use crate::library::transformer::{DINOV2, DINOV2_GATED};

/// The tensors by DINOv2's names, with a LayerScale of one where the network has none, and an unused mask token.
pub(super) fn arrays(export: &Export<'_>) -> Result<Arrays, String> {
    let ModelConfig::Vit(config) = export.model else {
        return Err("DINOv2's networks are vision transformers".into());
    };
    check_epsilon(config)?;
    let names = if config.mlp == MlpKind::Swiglu { DINOV2_GATED } else { DINOV2 };
    let mut arrays = renamed(export, |name| names.theirs(name).pop());
    let vector = |value: f32| Array { shape: vec![config.width], values: vec![value; config.width] };
    if config.layer_scale.is_none() {
        let scales = (0..config.depth).flat_map(|i| [1, 2].map(|k| format!("blocks.{i}.ls{k}.gamma")));
        arrays.extend(scales.map(|name| (name, vector(1.0))));
    }
    arrays.insert("mask_token".into(), Array { shape: vec![1, config.width], ..vector(0.0) });
    Ok(arrays)
}
