//! Vision transformers for other libraries: parameters by their names, and configurations.

use networks::{MlpKind, Positions, QkvBias, VitConfig};
use serde_json::{Value, json};

use super::names::{
    DINOV2, DINOV2_GATED, DINOV3, DINOV3_GATED, HF_DINOV2, HF_DINOV2_GATED, HF_DINOV3, HF_DINOV3_GATED,
    KEY_BIAS, Names, TIMM, TIMM_ROTARY, TIMM_ROTARY_GATED, TORCHVISION, VIT,
};
use crate::backbone::renamed::{ocelli_arrays, renamed_arrays};
use crate::backbone::{TimmModel, TransformersClassifier};
use crate::decimal::decimal;
use crate::export::Export;
use crate::file::{Array, Arrays};

/// Returns the parameters by timm's names. With registers, the class token's position is added to
/// the token: timm has positions for patches only.
pub(super) fn timm_arrays(config: &VitConfig, export: &Export<'_>) -> Result<Arrays, String> {
    if is_rotary(config) {
        check_class_token(config, "timm's rotary")?;
        check_rotary_epsilon(config, &[1e-5])?;
        check_keys(config, "timm's")?;
        let names = if config.mlp == MlpKind::Swiglu { TIMM_ROTARY_GATED } else { TIMM_ROTARY };
        let mut arrays = renamed_arrays(export, |name| names.library_names(name));
        arrays.retain(|name, _| !name.ends_with(KEY_BIAS));
        return Ok(arrays);
    }
    check_has_biases(config, "timm's")?;
    let mut arrays = ocelli_arrays(export);
    if !arrays.contains_key(TIMM.registers) {
        return Ok(arrays);
    }
    if let Some(positions) = arrays.remove(TIMM.pos_embed) {
        let [_, n, d] = positions.shape[..] else { return Ok(arrays) };
        if let Some(class) = arrays.get_mut(TIMM.cls_token) {
            for (class, position) in class.values.iter_mut().zip(&positions.values) {
                *class += position;
            }
        }
        let patches = Array { shape: vec![1, n - 1, d], values: positions.values[d..].to_vec() };
        arrays.insert(TIMM.pos_embed.into(), patches);
    }
    Ok(arrays)
}

/// Returns the parameters by torchvision's names.
pub(super) fn torchvision_arrays(config: &VitConfig, export: &Export<'_>) -> Result<Arrays, String> {
    check_epsilon(config)?;
    check_class_token(config, "torchvision's")?;
    check_tables(config, "torchvision's")?;
    match config {
        VitConfig { registers: 1.., .. } => Err("torchvision's transformers have no registers".into()),
        VitConfig { layer_scale: Some(_), .. } => Err("torchvision's transformers have no LayerScale".into()),
        VitConfig { mlp: MlpKind::Swiglu, .. } => Err("torchvision's transformers have no gated MLP".into()),
        _ => Ok(renamed_arrays(export, |name| TORCHVISION.library_names(name))),
    }
}

/// Returns the parameters by DINOv2's names, with a LayerScale of one where the network has none,
/// and an unused mask token.
pub(super) fn dinov2_arrays(config: &VitConfig, export: &Export<'_>) -> Result<Arrays, String> {
    check_epsilon(config)?;
    check_class_token(config, "DINOv2's")?;
    check_tables(config, "DINOv2's")?;
    let names = if config.mlp == MlpKind::Swiglu { DINOV2_GATED } else { DINOV2 };
    let mut arrays = renamed_arrays(export, |name| names.library_names(name));
    add_dinov2_parameters(&mut arrays, config, &names, "mask_token");
    Ok(arrays)
}

/// Returns the parameters and constants by DINOv3's names, with an unused mask token.
pub(super) fn dinov3_arrays(config: &VitConfig, export: &Export<'_>) -> Result<Arrays, String> {
    if !is_rotary(config) {
        return Err("DINOv3's transformers have rotary positions".into());
    }
    check_class_token(config, "DINOv3's")?;
    check_rotary_epsilon(config, &[1e-5, 1e-6])?;
    let names = if config.mlp == MlpKind::Swiglu { DINOV3_GATED } else { DINOV3 };
    let mut arrays = renamed_arrays(export, |name| names.library_names(name));
    let d = config.width;
    arrays.insert("mask_token".into(), Array { shape: vec![1, d], values: vec![0.0; d] });
    let n = d / config.heads / 4;
    let periods = (0..n).map(|k| config.rope_base.powf(k as f64 / n as f64) as f32).collect();
    arrays.insert("rope_embed.periods".into(), Array { shape: vec![n], values: periods });
    if config.qkv_bias == QkvBias::WithoutKeys {
        let mut mask = vec![1.0f32; 3 * d];
        mask[d..2 * d].fill(0.0);
        for i in 0..config.depth {
            let mask = Array { shape: vec![3 * d], values: mask.clone() };
            arrays.insert(format!("blocks.{i}.attn.qkv.bias_mask"), mask);
        }
    }
    Ok(arrays)
}

/// Returns the parameters by the names of transformers' files.
pub(super) fn transformers_arrays(config: &VitConfig, export: &Export<'_>) -> Result<Arrays, String> {
    check_class_token(config, "transformers'")?;
    if is_rotary(config) {
        return Ok(rotary_transformers_arrays(config, export));
    }
    let names = match (is_plain(config), config.mlp) {
        (true, _) => VIT,
        (false, MlpKind::Swiglu) => HF_DINOV2_GATED,
        (false, MlpKind::Gelu) => HF_DINOV2,
    };
    let mut arrays = renamed_arrays(export, |name| names.library_names(name));
    if !is_plain(config) {
        check_has_biases(config, "transformers' DINOv2")?;
        add_dinov2_parameters(&mut arrays, config, &names, "embeddings.mask_token");
    }
    Ok(arrays)
}

/// Returns the parameters of a network with rotary positions by the names of `DINOv3ViTModel`.
fn rotary_transformers_arrays(config: &VitConfig, export: &Export<'_>) -> Arrays {
    let names = if config.mlp == MlpKind::Swiglu { HF_DINOV3_GATED } else { HF_DINOV3 };
    let mut arrays = renamed_arrays(export, |name| names.library_names(name));
    if config.qkv_bias == QkvBias::WithoutKeys {
        arrays.retain(|name, _| !name.ends_with("attention.k_proj.bias"));
    }
    add_scales(&mut arrays, config, &names);
    let d = config.width;
    arrays.insert("embeddings.mask_token".into(), Array { shape: vec![1, 1, d], values: vec![0.0; d] });
    if config.registers == 0 {
        arrays.insert(names.registers.into(), Array { shape: vec![1, 0, d], values: Vec::new() });
    }
    arrays
}

/// Adds the parameters that a DINOv2 network always has: a LayerScale of one where `config` has
/// none, and a mask token.
fn add_dinov2_parameters(arrays: &mut Arrays, config: &VitConfig, names: &Names, mask_token: &str) {
    add_scales(arrays, config, names);
    let mask = Array { shape: vec![1, config.width], values: vec![0.0; config.width] };
    arrays.insert(mask_token.into(), mask);
}

/// Adds a LayerScale of one where `config` has none.
fn add_scales(arrays: &mut Arrays, config: &VitConfig, names: &Names) {
    if config.layer_scale.is_none() {
        let one = Array { shape: vec![config.width], values: vec![1.0; config.width] };
        for i in 0..config.depth {
            for k in [1, 2] {
                for name in names.library_names(&format!("blocks.{i}.ls{k}.gamma")) {
                    arrays.insert(name, one.clone());
                }
            }
        }
    }
}

/// Returns timm's constructor, for images of `size_px`.
pub(super) fn timm(config: &VitConfig, size_px: usize) -> Result<TimmModel, String> {
    if is_rotary(config) {
        return rotary_timm(config);
    }
    check_epsilon(config)?;
    // Architectures whose other settings are the same; all sizes are arguments.
    let architecture = match config.mlp {
        MlpKind::Gelu => "vit_small_patch16_224",
        MlpKind::Swiglu => "vit_giant_patch14_dinov2",
    };
    // timm's hidden layer of a gated MLP has both products.
    let hidden = config.hidden() * if config.mlp == MlpKind::Swiglu { 2 } else { 1 };
    let mut arguments = sizes(config, hidden);
    if config.registers > 0 {
        arguments["reg_tokens"] = json!(config.registers);
        arguments["no_embed_class"] = json!(true);
    }
    if config.image_px != size_px {
        arguments["dynamic_img_size"] = json!(true);
    }
    let pool = if config.class_token { "token" } else { "avg" };
    if !config.class_token {
        arguments["class_token"] = json!(false);
        arguments["global_pool"] = json!(pool);
        arguments["fc_norm"] = json!(false);
    }
    Ok(TimmModel { pool, ..constructor(architecture, arguments) })
}

/// Returns timm's constructor of a network with rotary positions, which takes images of any size.
fn rotary_timm(config: &VitConfig) -> Result<TimmModel, String> {
    check_class_token(config, "timm's rotary")?;
    check_rotary_epsilon(config, &[1e-5])?;
    check_keys(config, "timm's")?;
    let is_gated = config.mlp == MlpKind::Swiglu;
    let architecture = match (is_gated, config.qkv_bias == QkvBias::None) {
        (false, true) => "vit_small_patch16_dinov3",
        (false, false) => "vit_small_patch16_dinov3_qkvb",
        (true, true) => "vit_small_plus_patch16_dinov3",
        (true, false) => "vit_small_plus_patch16_dinov3_qkvb",
    };
    let mut arguments = sizes(config, config.hidden());
    arguments["num_reg_tokens"] = json!(config.registers);
    arguments["rope_temperature"] = json!(config.rope_base);
    arguments["global_pool"] = json!("token");
    if is_gated {
        arguments["swiglu_align_to"] = json!(1);
    }
    Ok(constructor(architecture, arguments))
}

/// Returns the arguments of timm's transformers whose MLP is called with `hidden` channels.
fn sizes(config: &VitConfig, hidden: usize) -> Value {
    json!({
        "img_size": config.image_px,
        "patch_size": config.patch_px,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": ratio_for(hidden, config.width),
        "init_values": config.layer_scale.map(decimal),
    })
}

fn constructor(architecture: &'static str, arguments: Value) -> TimmModel {
    TimmModel { architecture, arguments, first_conv: Some("patch_embed.proj"), pool: "token" }
}

/// Returns a ratio with which a library computes `hidden` channels from `width`, rounding down.
pub(super) fn ratio_for(hidden: usize, width: usize) -> f64 {
    let mut ratio = hidden as f64 / width as f64;
    while ((width as f64 * ratio) as usize) < hidden {
        ratio *= 1.0 + 1e-9;
    }
    ratio
}

/// Returns the configuration of a `DINOv3ViTModel`.
fn rotary_transformers(config: &VitConfig) -> Value {
    let is_gated = config.mlp == MlpKind::Swiglu;
    json!({
        "model_type": "dinov3_vit",
        "architectures": ["DINOv3ViTModel"],
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.hidden(),
        "hidden_act": if is_gated { "silu" } else { "gelu" },
        "use_gated_mlp": is_gated,
        "layer_norm_eps": config.norm_epsilon,
        "layerscale_value": 1.0,
        "drop_path_rate": 0.0,
        "image_size": config.image_px,
        "patch_size": config.patch_px,
        "num_channels": config.channels,
        "num_register_tokens": config.registers,
        "query_bias": config.qkv_bias != QkvBias::None,
        "key_bias": config.qkv_bias == QkvBias::All,
        "value_bias": config.qkv_bias != QkvBias::None,
        "proj_bias": true,
        "mlp_bias": true,
        "rope_theta": config.rope_base,
        "pos_embed_rescale": config.rope_rescale,
        "pos_embed_jitter": config.rope_jitter,
        "pos_embed_shift": config.rope_shift,
    })
}

/// Returns the configuration of a `ViTModel`, or of a DINOv2 model if the network has registers,
/// LayerScale or a gated MLP.
pub(super) fn transformers(config: &VitConfig) -> Result<Value, String> {
    check_class_token(config, "transformers'")?;
    if is_rotary(config) {
        return Ok(rotary_transformers(config));
    }
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
        "num_channels": config.channels,
        "qkv_bias": config.qkv_bias != QkvBias::None,
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
    // transformers takes an integer, from which it computes the width of the hidden layer as Ocelli
    // does.
    let ratio = (1..=64).find(|ratio| {
        VitConfig { mlp_ratio: f64::from(*ratio), ..config.clone() }.hidden() == config.hidden()
    });
    let Some(ratio) = ratio else {
        return Err(format!(
            "its hidden layers have {} channels, for which mlp_ratio would not be a whole number",
            config.hidden()
        ));
    };
    json["mlp_ratio"] = json!(ratio);
    json["use_swiglu_ffn"] = json!(config.mlp == MlpKind::Swiglu);
    json["drop_path_rate"] = json!(0.0);
    json["layerscale_value"] = json!(1.0);
    if config.registers > 0 {
        json["num_register_tokens"] = json!(config.registers);
    }
    Ok(json)
}

/// Returns the `ViTForImageClassification`, or that of DINOv2; `None` for DINOv3, which has none.
pub(super) fn transformers_classifier(config: &VitConfig) -> Option<TransformersClassifier> {
    if is_rotary(config) {
        return None;
    }
    let (architecture, backbone) = match (is_plain(config), config.registers) {
        (true, _) => ("ViTForImageClassification", "vit"),
        (false, 0) => ("Dinov2ForImageClassification", "dinov2"),
        (false, _) => ("Dinov2WithRegistersForImageClassification", "dinov2_with_registers"),
    };
    Some(TransformersClassifier {
        architecture,
        backbone,
        layer: "classifier",
        reads_patches: !is_plain(config),
    })
}

/// Returns `true` if the network is a plain ViT rather than one of DINOv2.
pub(super) fn is_plain(config: &VitConfig) -> bool {
    config.layer_scale.is_none() && config.registers == 0 && config.mlp == MlpKind::Gelu
}

/// Checks that norms add at most 1e-6, the libraries' own value, to the variance; a smaller value
/// differs by rounding only.
fn check_epsilon(config: &VitConfig) -> Result<(), String> {
    if config.norm_epsilon <= 1e-6 {
        Ok(())
    } else {
        Err(format!("its norms add {} to the variance, but this library's add 1e-6", config.norm_epsilon))
    }
}

/// Returns `true` for a network with rotary positions.
fn is_rotary(config: &VitConfig) -> bool {
    config.positions == Positions::Rope
}

/// Checks that a network has a class token, as those of a library do. `library` is a genitive.
fn check_class_token(config: &VitConfig, library: &str) -> Result<(), String> {
    if config.class_token { Ok(()) } else { Err(format!("{library} transformers have a class token")) }
}

/// Checks that a network has a position embedding and biases, as networks of a library do.
/// `library` is a genitive, such as `timm's`.
fn check_tables(config: &VitConfig, library: &str) -> Result<(), String> {
    if is_rotary(config) {
        Err(format!("{library} transformers have no rotary positions"))
    } else {
        check_has_biases(config, library)
    }
}

/// Checks that queries, keys and values have biases.
fn check_has_biases(config: &VitConfig, library: &str) -> Result<(), String> {
    match config.qkv_bias {
        QkvBias::None => Err(format!("{library} queries, keys and values have biases")),
        QkvBias::All | QkvBias::WithoutKeys => Ok(()),
    }
}

/// Checks that keys have no bias, which rotary positions do not cancel.
fn check_keys(config: &VitConfig, library: &str) -> Result<(), String> {
    match config.qkv_bias {
        QkvBias::All => Err(format!("{library} networks with rotary positions have no key biases")),
        QkvBias::WithoutKeys | QkvBias::None => Ok(()),
    }
}

/// Checks that norms of a network with rotary positions add one of the `values` that its library
/// has to the variance.
fn check_rotary_epsilon(config: &VitConfig, values: &[f64]) -> Result<(), String> {
    if values.contains(&config.norm_epsilon) {
        return Ok(());
    }
    let supported = values.iter().map(|value| format!("{value:e}")).collect::<Vec<_>>().join(" or ");
    Err(format!("its norms add {} to the variance, but this library's add {supported}", config.norm_epsilon))
}
