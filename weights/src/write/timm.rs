//! Folders and state dictionaries of timm.

use networks::{MlpKind, ModelConfig, NamedSize, RegnetConfig, ResnetConfig, Size, StemKind, VitConfig};
use serde_json::{Value, json};

use super::renamed::{ours, renamed};
use crate::export::Export;
use crate::file::{Array, Arrays};
use crate::library::convnet::regnet_in_timm;
use crate::library::transformer::TIMM;

/// The tensors by timm's names. With registers, the class token's position is added to it: there, positions are for
/// patches alone.
pub(super) fn arrays(export: &Export<'_>) -> Arrays {
    let mut arrays = match export.model {
        ModelConfig::RegnetY(_) => return renamed(export, regnet_in_timm),
        _ => ours(export),
    };
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

/// `config.json` of a folder.
pub(super) fn config(export: &Export<'_>) -> Result<Value, String> {
    let (architecture, arguments, [first_conv, classifier], pool) = match export.model {
        ModelConfig::Vit(config) => {
            let (name, mut arguments) = transformer(config)?;
            if config.image_px != export.preprocessing.size_px as usize {
                arguments["dynamic_img_size"] = json!(true);
            }
            (name, arguments, ["patch_embed.proj", "head"], "token")
        }
        ModelConfig::Resnet(config) => {
            let (name, arguments) = resnet(config)?;
            (name, arguments, ["conv1", "fc"], "avg")
        }
        ModelConfig::RegnetY(config) => (regnet(config)?, json!({}), ["stem.conv", "head.fc"], "avg"),
        #[allow(unreachable_patterns)]
        _ => return Err("timm has no such network".into()),
    };
    let preprocessing = &export.preprocessing;
    let px = preprocessing.size_px;
    Ok(json!({
        "architecture": architecture,
        "num_classes": 0,
        "num_features": export.model.width(),
        "global_pool": pool,
        "model_args": arguments,
        "pretrained_cfg": {
            "tag": "ocelli",
            "custom_load": false,
            "input_size": [3, px, px],
            "fixed_input_size": pool == "token",
            "interpolation": "bicubic",
            "crop_pct": preprocessing.crop_share(),
            "crop_mode": "center",
            "mean": decimal(preprocessing.normalization.mean),
            "std": decimal(preprocessing.normalization.std),
            "num_classes": 0,
            "pool_size": null,
            "first_conv": first_conv,
            "classifier": classifier,
        },
    }))
}

/// Three numbers with the digits that they were written with.
pub(super) fn decimal(values: [f32; 3]) -> [f64; 3] {
    values.map(digits)
}

/// The number of 64 bits that reads like `value`.
fn digits(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}

/// The libraries' own code adds 1e-6 to the variance; where a network has less, the difference is rounding.
pub(super) fn check_epsilon(config: &VitConfig) -> Result<(), String> {
    match config.norm_epsilon <= 1e-6 {
        true => Ok(()),
        false => Err(format!("its norms add {} to the variance, this library's 1e-6", config.norm_epsilon)),
    }
}

fn transformer(config: &VitConfig) -> Result<(&'static str, Value), String> {
    check_epsilon(config)?;
    // Those whose other settings are the same; all sizes are arguments.
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
    let layer_scale = config.layer_scale.map(digits);
    let mut arguments = json!({
        "img_size": config.image_px,
        "patch_size": config.patch_px,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": mlp_ratio,
        "init_values": layer_scale,
    });
    if config.registers > 0 {
        arguments["reg_tokens"] = json!(config.registers);
        arguments["no_embed_class"] = json!(true);
    }
    Ok((architecture, arguments))
}

fn resnet(config: &ResnetConfig) -> Result<(&'static str, Value), String> {
    if config.stem == StemKind::Small {
        return Err("timm's ResNets have no 3×3 stem without pooling".into());
    }
    if config.width != 64 {
        return Err(format!("timm's ResNets begin with 64 channels, this one with {}", config.width));
    }
    let (depths, is_bottleneck) = config.stages();
    // The one of this kind of branch, with other numbers of them.
    let architecture = if is_bottleneck { "resnet50" } else { "resnet18" };
    Ok((architecture, json!({ "layers": depths })))
}

fn regnet(config: &RegnetConfig) -> Result<&'static str, String> {
    let Size::Named(size) = config.size else {
        return Err("timm has the published RegNetYs alone".into());
    };
    Ok(match size {
        NamedSize::Mf200 => "regnety_002",
        NamedSize::Mf400 => "regnety_004",
        NamedSize::Mf600 => "regnety_006",
        NamedSize::Mf800 => "regnety_008",
        NamedSize::Gf1_6 => "regnety_016",
        NamedSize::Gf3_2 => "regnety_032",
        NamedSize::Gf4 => "regnety_040",
        NamedSize::Gf6_4 => "regnety_064",
        NamedSize::Gf8 => "regnety_080_tv",
        NamedSize::Gf12 => "regnety_120",
        NamedSize::Gf16 => "regnety_160",
        NamedSize::Gf32 => "regnety_320",
        NamedSize::Gf64 => "regnety_640",
        NamedSize::Gf128 => "regnety_1280",
        NamedSize::Gf256 => "regnety_2560",
        NamedSize::B10 => return Err("timm has no RegNetY of 10 billion parameters".into()),
    })
}
