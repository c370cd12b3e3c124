//! Vision transformers for other libraries: parameters by their names, and configurations.

use networks::{MlpKind, VitConfig};
use serde_json::{Value, json};

use super::names::{DINOV2, DINOV2_GATED, HF_DINOV2, HF_DINOV2_GATED, Names, TIMM, TORCHVISION, VIT};
use crate::backbone::TimmModel;
use crate::backbone::renamed::{ours, renamed};
use crate::decimal::decimal;
use crate::export::Export;
use crate::file::{Array, Arrays};

/// Returns the parameters by timm's names. With registers, the class token's position is added to the token: timm has
/// positions for patches only.
pub(super) fn timm_arrays(export: &Export<'_>) -> Arrays {
    let mut arrays = ours(export);
    if !arrays.contains_key(TIMM.registers) {
        return arrays;
    }
    if let Some(positions) = arrays.remove(TIMM.pos_embed) {
        let [_, n, d] = positions.shape[..] else { return arrays };
        if let Some(class) = arrays.get_mut(TIMM.cls_token) {
            class.values.iter_mut().zip(&positions.values).for_each(|(class, position)| *class += position);
        }
        let patches = Array { shape: vec![1, n - 1, d], values: positions.values[d..].to_vec() };
        arrays.insert(TIMM.pos_embed.into(), patches);
    }
    arrays
}

/// Returns the parameters by torchvision's names.
pub(super) fn torchvision_arrays(config: &VitConfig, export: &Export<'_>) -> Result<Arrays, String> {
    check_epsilon(config)?;
    match config {
        VitConfig { registers: 1.., .. } => Err("torchvision's transformers have no registers".into()),
        VitConfig { layer_scale: Some(_), .. } => Err("torchvision's transformers have no LayerScale".into()),
        VitConfig { mlp: MlpKind::Swiglu, .. } => Err("torchvision's transformers have no gated MLP".into()),
        _ => Ok(renamed(export, |name| TORCHVISION.theirs(name))),
    }
}

/// Returns the parameters by DINOv2's names, with a LayerScale of one where the network has none, and an unused mask token.
pub(super) fn dinov2_arrays(config: &VitConfig, export: &Export<'_>) -> Result<Arrays, String> {
    check_epsilon(config)?;
    let names = if config.mlp == MlpKind::Swiglu { DINOV2_GATED } else { DINOV2 };
    let mut arrays = renamed(export, |name| names.theirs(name));
    complete(&mut arrays, config, &names, "mask_token");
    Ok(arrays)
}

/// Returns the parameters by the names of transformers' files.
pub(super) fn transformers_arrays(config: &VitConfig, export: &Export<'_>) -> Arrays {
    let names = match (is_plain(config), config.mlp) {
        (true, _) => VIT,
        (false, MlpKind::Swiglu) => HF_DINOV2_GATED,
        (false, MlpKind::Gelu) => HF_DINOV2,
    };
    let mut arrays = renamed(export, |name| names.theirs(name));
    if !is_plain(config) {
        complete(&mut arrays, config, &names, "embeddings.mask_token");
    }
    arrays
}

/// Adds the parameters that a DINOv2 network always has: a LayerScale of one where `config` has none, and a mask token.
fn complete(arrays: &mut Arrays, config: &VitConfig, names: &Names, mask_token: &str) {
    let vector = |value: f32| Array { shape: vec![config.width], values: vec![value; config.width] };
    if config.layer_scale.is_none() {
        let scales = (0..config.depth).flat_map(|i| [1, 2].map(|k| format!("blocks.{i}.ls{k}.gamma")));
        arrays.extend(scales.flat_map(|name| names.theirs(&name)).map(|name| (name, vector(1.0))));
    }
    arrays.insert(mask_token.into(), Array { shape: vec![1, config.width], ..vector(0.0) });
}

/// Returns timm's constructor, for images of `size_px`.
pub(super) fn timm(config: &VitConfig, size_px: usize) -> Result<TimmModel, String> {
    check_epsilon(config)?;
    // Architectures whose other settings are the same; all sizes are arguments.
    let architecture = match config.mlp {
        MlpKind::Gelu => "vit_small_patch16_224",
        MlpKind::Swiglu => "vit_giant_patch14_dinov2",
    };
    // timm's hidden layer of a gated MLP has both products.
    let hidden = config.hidden() * if config.mlp == MlpKind::Swiglu { 2 } else { 1 };
    let mut mlp_ratio = hidden as f64 / config.width as f64;
    while ((config.width as f64 * mlp_ratio) as usize) < hidden {
        mlp_ratio *= 1.0 + 1e-9;
    }
    let mut arguments = json!({
        "img_size": config.image_px,
        "patch_size": config.patch_px,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": mlp_ratio,
        "init_values": config.layer_scale.map(decimal),
    });
    if config.registers > 0 {
        arguments["reg_tokens"] = json!(config.registers);
        arguments["no_embed_class"] = json!(true);
    }
    if config.image_px != size_px {
        arguments["dynamic_img_size"] = json!(true);
    }
    Ok(TimmModel {
        architecture,
        arguments,
        first_conv: "patch_embed.proj",
        classifier: "head",
        pool: "token",
    })
}

/// Returns the configuration of a `ViTModel`, or of a DINOv2 model if the network has registers, LayerScale or a gated MLP.
pub(super) fn transformers(config: &VitConfig) -> Result<Value, String> {
    let mut json = json!({
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.02,
        "layer_norm_eps": config.norm_epsilon,
        "image_size": config.image_px,
        "patch_size": config.patch_px,
        "num_channels": 3,
        "qkv_bias": true,
    });
    if is_plain(config) {
        json["model_type"] = json!("vit");
        json["architectures"] = json!(["ViTModel"]);
        json["intermediate_size"] = json!(config.hidden());
        return Ok(json);
    }
    let (kind, class) = match config.registers {
        0 => ("dinov2", "Dinov2Model"),
        _ => ("dinov2_with_registers", "Dinov2WithRegistersModel"),
    };
    json["model_type"] = json!(kind);
    json["architectures"] = json!([class]);
    // transformers takes an integer, from which it computes the width of the hidden layer as Ocelli does.
    let fits = |ratio: &u32| {
        VitConfig { mlp_ratio: f64::from(*ratio), ..config.clone() }.hidden() == config.hidden()
    };
    let ratio = (1..=64).find(fits).ok_or_else(|| {
        format!(
            "its hidden layers have {} channels, for which mlp_ratio would be no whole number",
            config.hidden()
        )
    })?;
    json["mlp_ratio"] = json!(ratio);
    json["use_swiglu_ffn"] = json!(config.mlp == MlpKind::Swiglu);
    json["drop_path_rate"] = json!(0.0);
    json["layerscale_value"] = json!(1.0);
    if config.registers > 0 {
        json["num_register_tokens"] = json!(config.registers);
    }
    Ok(json)
}

/// Returns `true` if the network is a plain ViT rather than one of DINOv2.
fn is_plain(config: &VitConfig) -> bool {
    config.layer_scale.is_none() && config.registers == 0 && config.mlp == MlpKind::Gelu
}

/// Checks that norms add at most 1e-6, the libraries' own value, to the variance; a smaller value differs by rounding only.
fn check_epsilon(config: &VitConfig) -> Result<(), String> {
    match config.norm_epsilon <= 1e-6 {
        true => Ok(()),
        false => Err(format!("its norms add {} to the variance, this library's 1e-6", config.norm_epsilon)),
    }
}
