//! Python code that builds vision transformers in torchvision, DINOv2 and DINOv3, and renames
//! parameters for timm.

use networks::{MlpKind, Positions, QkvBias, VitConfig};

use super::write::ratio_for;
use crate::backbone::{PythonClassifier, PythonNetwork, in_chans};
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

/// Statements that give `weights` timm's positions, which are those of patches alone.
const TIMM_POSITIONS: &str = r#"positions = weights["pos_embed"]
weights["cls_token"] = weights["cls_token"] + positions[:, :1]
weights["pos_embed"] = positions[:, 1:]
"#;

/// Statements that give `weights` timm's names of LayerScales in networks with rotary positions.
const TIMM_SCALES: &str = r#"for name in list(weights):
    weights[name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2")] = weights.pop(name)
"#;

/// Statements of a loop over blocks that give `weights` timm's biases of queries and values.
const TIMM_BIASES: &str = r#"    q_bias, _, v_bias = weights.pop(f"blocks.{block}.attn.qkv.bias").chunk(3)
    weights[f"blocks.{block}.attn.q_bias"] = q_bias
    weights[f"blocks.{block}.attn.v_bias"] = v_bias
"#;

/// Statements of a loop over blocks that give `weights` timm's two layers of a gated MLP.
const TIMM_GATES: &str = r#"    for kind in ["weight", "bias"]:
        gate, value = weights.pop(f"blocks.{block}.mlp.fc1.{kind}").chunk(2)
        weights[f"blocks.{block}.mlp.fc1_g.{kind}"] = gate
        weights[f"blocks.{block}.mlp.fc1_x.{kind}"] = value
"#;

/// Returns Python statements that give `weights`, the parameters by Ocelli's names, those of timm.
pub(super) fn timm_renames(config: &VitConfig) -> String {
    let mut statements = String::new();
    if config.positions != Positions::Rope {
        if config.registers > 0 {
            statements.push_str(TIMM_POSITIONS);
        }
        return statements;
    }
    if config.layer_scale.is_some() {
        statements.push_str(TIMM_SCALES);
    }
    let has_biases = config.qkv_bias != QkvBias::None;
    let is_gated = config.mlp == MlpKind::Swiglu;
    if has_biases || is_gated {
        statements.push_str(&format!("for block in range({}):\n", config.depth));
    }
    if has_biases {
        statements.push_str(TIMM_BIASES);
    }
    if is_gated {
        statements.push_str(TIMM_GATES);
    }
    statements
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
        changes: String::new(),
        classifier: Some(PythonClassifier { module: "heads", layer: "heads.head" }),
    }
}

/// Returns Python code that builds the network with DINOv2's own classes.
fn dinov2_code(config: &VitConfig) -> PythonNetwork {
    let is_gated = config.mlp == MlpKind::Swiglu;
    PythonNetwork {
        imports: "from dinov2.models.vision_transformer import DinoVisionTransformer\n",
        expression: format!(
            "DinoVisionTransformer(img_size={}, {}, mlp_ratio={}, ffn_layer=\"{}\", init_values=1.0, \
             block_chunks=0, num_register_tokens={}, interpolate_offset={:?}, interpolate_antialias={})",
            config.image_px,
            sizes(config),
            ratio(config),
            if is_gated { "swiglufused" } else { "mlp" },
            config.registers,
            config.pos_offset,
            python_bool(config.pos_antialias)
        ),
        changes: String::new(),
        classifier: None,
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
        changes: String::new(),
        classifier: None,
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
