//! State dictionaries of torchvision's networks, without their classifiers.

use networks::{MlpKind, ModelConfig, VitConfig};

use super::renamed::{ours, renamed};
use super::timm::check_epsilon;
use crate::export::Export;
use crate::file::Arrays;
use crate::library::transformer::TORCHVISION;

/// The tensors by torchvision's names, which are ours for convolutional networks.
pub(super) fn arrays(export: &Export<'_>) -> Result<Arrays, String> {
    let ModelConfig::Vit(config) = export.model else { return Ok(ours(export)) };
    check_epsilon(config)?;
    match config {
        VitConfig { registers: 1.., .. } => Err("torchvision's transformers have no registers".into()),
        VitConfig { layer_scale: Some(_), .. } => Err("torchvision's transformers have no LayerScale".into()),
        VitConfig { mlp: MlpKind::Swiglu, .. } => Err("torchvision's transformers have no gated MLP".into()),
        // Each of our names is one of torchvision's.
        _ => Ok(renamed(export, |name| TORCHVISION.theirs(name).pop())),
    }
}
