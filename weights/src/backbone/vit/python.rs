//! Python code that builds vision transformers in torchvision, DINOv2 and DINOv3.

use networks::{MlpKind, QkvBias, VitConfig};

use super::write::ratio_for;
use crate::backbone::{PythonNetwork, in_chans};
use crate::library::Library;

/// Returns Python code that builds the network with the code of `library`.
pub(super) fn network(config: &VitConfig, library: Library) -> Option<PythonNetwork> {
    match library {
        Library::Torchvision => Some(torchvision_code(config)),
        Library::Dinov2 => Some(dinov2_code(config)),
        Library::Dinov3 => Some(dinov3_code(config)),
        _ => None,
    }
}

/// Returns Python code that builds the network with torchvision's own class.
fn torchvision_code(config: &VitConfig) -> PythonNetwork {
    PythonNetwork {
        imports: "from torchvision.models import VisionTransformer\n",
        expression: format!(
            "VisionTransformer(image_size={}, patch_size={}, num_layers={}, num_heads={}, hidden_dim={}, \
             mlp_dim={})",
            config.image_px,
            config.patch_px,
            config.depth,
            config.heads,
            config.width,
            config.hidden()
        ),
        without_classifier: "model.heads = torch.nn.Identity()\n",
    }
}

/// Returns Python code that builds the network with DINOv2's own classes.
fn dinov2_code(config: &VitConfig) -> PythonNetwork {
    let is_gated = config.mlp == MlpKind::Swiglu;
    PythonNetwork {
        imports: "from dinov2.models.vision_transformer import DinoVisionTransformer\n",
        expression: format!(
            "DinoVisionTransformer(img_size={}, {}, mlp_ratio={}, ffn_layer=\"{}\", init_values=1.0, \
             block_chunks=0, num_register_tokens={})",
            config.image_px,
            sizes(config),
            ratio(config),
            if is_gated { "swiglufused" } else { "mlp" },
            config.registers
        ),
        without_classifier: "",
    }
}

/// Returns Python code that builds the network with DINOv3's own classes.
fn dinov3_code(config: &VitConfig) -> PythonNetwork {
    let is_gated = config.mlp == MlpKind::Swiglu;
    PythonNetwork {
        imports: "from dinov3.models.vision_transformer import DinoVisionTransformer\n",
        expression: format!(
            "DinoVisionTransformer({}, ffn_ratio={}, ffn_layer=\"{}\", n_storage_tokens={}, \
             layerscale_init={}, norm_layer=\"{}\", qkv_bias={}, mask_k_bias={}, pos_embed_rope_base={}, \
             pos_embed_rope_dtype=\"fp32\")",
            sizes(config),
            ratio(config),
            if is_gated { "swiglu" } else { "mlp" },
            config.registers,
            if config.layer_scale.is_some() { "1.0" } else { "None" },
            // DINOv3's names of the two values of epsilon.
            if config.norm_epsilon > 5e-6 { "layernormbf16" } else { "layernorm" },
            python_bool(config.qkv_bias != QkvBias::None),
            python_bool(config.qkv_bias == QkvBias::WithoutKeys),
            config.rope_base
        ),
        without_classifier: "",
    }
}

fn python_bool(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}

fn sizes(config: &VitConfig) -> String {
    format!(
        "{}patch_size={}, embed_dim={}, depth={}, num_heads={}",
        in_chans(config.channels),
        config.patch_px,
        config.width,
        config.depth,
        config.heads
    )
}

/// Returns the ratio that yields the hidden channels: both implementations take two thirds of it
/// for a gated MLP.
fn ratio(config: &VitConfig) -> f64 {
    match config.mlp {
        MlpKind::Gelu => ratio_for(config.hidden(), config.width),
        MlpKind::Swiglu => ratio_for((config.hidden() * 3).div_ceil(2), config.width),
    }
}
