//! Folders of transformers.

use networks::{MlpKind, ModelConfig, RegnetConfig, ResnetConfig, StemKind, VitConfig};
use serde_json::{Value, json};

use super::renamed::renamed;
use super::timm::decimal;
use crate::export::Export;
use crate::file::{Array, Arrays};
use crate::library::convnet::{regnet_in_transformers, resnet_in_transformers};
use crate::library::transformer::{HF_DINOV2, HF_DINOV2_GATED, Names, VIT};

/// `config.json`, and the tensors by the names of transformers' files.
pub(super) fn model(export: &Export<'_>) -> Result<(Value, Arrays), String> {
    match export.model {
        ModelConfig::Vit(config) => transformer(config, export),
        ModelConfig::Resnet(config) => Ok((resnet(config)?, renamed(export, resnet_in_transformers))),
        ModelConfig::RegnetY(config) => Ok((regnet(config), renamed(export, regnet_in_transformers))),
        #[allow(unreachable_patterns)]
        _ => Err("transformers has no such network".into()),
    }
}

/// `preprocessor_config.json`.
pub(super) fn preprocessor(export: &Export<'_>) -> Value {
    let preprocessing = &export.preprocessing;
    let px = preprocessing.size_px;
    json!({
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": true,
        "do_resize": true,
        "size": { "shortest_edge": preprocessing.resize_px },
        // Bicubic, by Pillow's number.
        "resample": 3,
        "do_center_crop": true,
        "crop_size": { "height": px, "width": px },
        "do_rescale": true,
        "rescale_factor": 1.0 / 255.0,
        "do_normalize": true,
        "image_mean": decimal(preprocessing.normalization.mean),
        "image_std": decimal(preprocessing.normalization.std),
    })
}

/// As DINOv2 where it has what `ViTModel` lacks.
fn transformer(config: &VitConfig, export: &Export<'_>) -> Result<(Value, Arrays), String> {
    let is_gated = config.mlp == MlpKind::Swiglu;
    let is_plain = config.layer_scale.is_none() && config.registers == 0 && !is_gated;
    let names = match (is_plain, is_gated) {
        (true, _) => VIT,
        (false, true) => HF_DINOV2_GATED,
        (false, false) => HF_DINOV2,
    };
    let mut arrays = split(export, &names);
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
    if is_plain {
        json["model_type"] = json!("vit");
        json["architectures"] = json!(["ViTModel"]);
        json["intermediate_size"] = json!(config.hidden());
        return Ok((json, arrays));
    }
    let (kind, class) = match config.registers {
        0 => ("dinov2", "Dinov2Model"),
        _ => ("dinov2_with_registers", "Dinov2WithRegistersModel"),
    };
    json["model_type"] = json!(kind);
    json["architectures"] = json!([class]);
    // A whole number there, from which it finds the hidden layer's width as we do.
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
    json["use_swiglu_ffn"] = json!(is_gated);
    json["drop_path_rate"] = json!(0.0);
    json["layerscale_value"] = json!(1.0);
    if config.registers > 0 {
        json["num_register_tokens"] = json!(config.registers);
    }
    let vector = |value: f32| Array { shape: vec![config.width], values: vec![value; config.width] };
    if config.layer_scale.is_none() {
        let scales = (0..config.depth).flat_map(|i| [1, 2].map(|k| format!("blocks.{i}.ls{k}.gamma")));
        arrays.extend(scales.flat_map(|name| names.theirs(&name)).map(|name| (name, vector(1.0))));
    }
    arrays.insert("embeddings.mask_token".into(), Array { shape: vec![1, config.width], ..vector(0.0) });
    Ok((json, arrays))
}

/// The tensors by `names`, those that are several there divided along their first dimension.
fn split(export: &Export<'_>, names: &Names) -> Arrays {
    let mut arrays = Arrays::new();
    for tensor in export.tensors {
        let theirs = names.theirs(&tensor.name);
        let len = tensor.values.len() / theirs.len();
        let mut shape = tensor.shape.clone();
        shape[0] /= theirs.len();
        for (name, values) in theirs.into_iter().zip(tensor.values.chunks_exact(len)) {
            arrays.insert(name, Array { shape: shape.clone(), values: values.to_vec() });
        }
    }
    arrays
}

fn resnet(config: &ResnetConfig) -> Result<Value, String> {
    if config.stem == StemKind::Small {
        return Err("ResNets of transformers have no 3×3 stem without pooling".into());
    }
    let (depths, is_bottleneck) = config.stages();
    let factor = if is_bottleneck { 4 } else { 1 };
    let widths = [0, 1, 2, 3].map(|stage| (config.width << stage) * factor);
    Ok(json!({
        "model_type": "resnet",
        "architectures": ["ResNetModel"],
        "num_channels": 3,
        "embedding_size": config.width,
        "hidden_sizes": widths,
        "depths": depths,
        "layer_type": if is_bottleneck { "bottleneck" } else { "basic" },
        "hidden_act": "relu",
        "downsample_in_first_stage": false,
        "downsample_in_bottleneck": false,
    }))
}

fn regnet(config: &RegnetConfig) -> Value {
    let stages = config.stages();
    let (widths, depths): (Vec<usize>, Vec<usize>) =
        stages.iter().map(|stage| (stage.width, stage.depth)).unzip();
    json!({
        "model_type": "regnet",
        "architectures": ["RegNetModel"],
        "num_channels": 3,
        "embedding_size": 32,
        "hidden_sizes": widths,
        "depths": depths,
        "groups_width": stages.iter().map(|stage| stage.group_width).max(),
        "layer_type": "y",
        "hidden_act": "relu",
        "downsample_in_first_stage": true,
    })
}
