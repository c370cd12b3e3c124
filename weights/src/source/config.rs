//! Configuration files of timm and transformers.

use augment::{Depth, Transform};
use networks::{ModelConfig, Normalization, Pixels};
use serde_json::Value;

use super::Source;
use crate::preprocessing::Preprocessing;

/// Smallest image size for which the processor of ConvNeXT in transformers resizes without a crop.
const UNCROPPED_PX: u32 = 384;

/// Returns the preprocessing stated by `source`, or `fallback` if it states none; adds a sentence
/// to `assumed` for each assumption.
pub(crate) fn preprocessing(
    source: &Source,
    fallback: Preprocessing,
    is_normalization_known: bool,
    assumed: &mut Vec<String>,
) -> Result<Preprocessing, String> {
    let mut stated = match &source.preprocessor {
        Some(preprocessor) => transformers_preprocessing(preprocessor, &fallback)?,
        None => None,
    };
    if let (None, Some(config)) = (&stated, &source.config) {
        stated = timm_preprocessing(config, &fallback)?;
    }
    let Some(StatedPreprocessing { preprocessing, interpolation, is_cropped }) = stated else {
        if !is_normalization_known {
            assumed.push(
                "the file does not state its color normalization; assuming ImageNet's mean and deviation \
                 (override with --normalization)"
                    .into(),
            );
        }
        return Ok(fallback);
    };
    if interpolation != "bicubic" {
        assumed.push(format!("it was trained with {interpolation} resizing; Ocelli resizes bicubically"));
    }
    if !is_cropped {
        assumed.push(
            "its library resizes whole images to squares, whatever their shape; Ocelli resizes the short side \
             and crops the middle"
                .into(),
        );
    }
    Ok(preprocessing)
}

/// Preprocessing that a configuration states.
struct StatedPreprocessing {
    preprocessing: Preprocessing,
    /// Name of the interpolation.
    interpolation: &'static str,
    /// Whether images keep their shape and are cropped.
    is_cropped: bool,
}

/// Returns the preprocessing in `preprocessor_config.json`; `None` if it does not state the
/// normalization.
fn transformers_preprocessing(
    config: &Value,
    fallback: &Preprocessing,
) -> Result<Option<StatedPreprocessing>, String> {
    let Some(normalization) = normalization(config, "image_mean", "image_std")? else { return Ok(None) };
    let stated_px = side_px(&config["size"]).unwrap_or(fallback.transform.resize_px);
    let is_cropped = config["do_center_crop"].as_bool().unwrap_or(config["crop_size"].is_object());
    let crop_ratio = config["crop_pct"].as_f64().filter(|ratio| (0.1..=1.0).contains(ratio));
    let keeps_shape = match crop_ratio {
        _ if is_cropped => true,
        Some(_) => stated_px < UNCROPPED_PX,
        None => config["size"]["shortest_edge"].is_number(),
    };
    let (resize_px, size_px) = match crop_ratio {
        _ if is_cropped => (stated_px, side_px(&config["crop_size"]).unwrap_or(stated_px)),
        // ConvNeXT's processor: for images that it crops, the stated size is the crop's.
        Some(ratio) if stated_px < UNCROPPED_PX => ((f64::from(stated_px) / ratio).floor() as u32, stated_px),
        _ => (stated_px, stated_px),
    };
    // Pillow's numbers.
    let interpolation = match config["resample"].as_u64() {
        Some(2) => "bilinear",
        Some(1) => "Lanczos",
        Some(0) => "nearest",
        _ => "bicubic",
    };
    let factor = config["rescale_factor"].as_f64();
    let is_16_bit = factor.is_some_and(|factor| (factor * 65_535.0 - 1.0).abs() < 1e-3);
    let pixels = Pixels { normalization, depth: if is_16_bit { Depth::Sixteen } else { Depth::Eight } };
    let preprocessing = Preprocessing::new(pixels, Transform { resize_px, size_px });
    Ok(Some(StatedPreprocessing { preprocessing, interpolation, is_cropped: keeps_shape }))
}

/// Returns the edge of images that `size` states: the short one, the height, or the edge of a
/// square.
fn side_px(size: &Value) -> Option<u32> {
    let side = size["shortest_edge"].as_u64().or(size["height"].as_u64()).or(size.as_u64())?;
    Some(u32::try_from(side).unwrap_or(u32::MAX))
}

/// Returns the preprocessing in timm's `config.json`; `None` if it does not state the
/// normalization.
fn timm_preprocessing(
    config: &Value,
    fallback: &Preprocessing,
) -> Result<Option<StatedPreprocessing>, String> {
    let config = config.get("pretrained_cfg").unwrap_or(config);
    let Some(normalization) = normalization(config, "mean", "std")? else { return Ok(None) };
    let size_px = config["input_size"][2]
        .as_u64()
        .map_or(fallback.transform.size_px, |side| u32::try_from(side).unwrap_or(u32::MAX));
    let crop_ratio = config["crop_pct"].as_f64().filter(|ratio| (0.1..=1.0).contains(ratio)).unwrap_or(0.875);
    let resize_px = (f64::from(size_px) / crop_ratio).floor() as u32;
    let interpolation = match config["interpolation"].as_str() {
        Some("bilinear") => "bilinear",
        _ => "bicubic",
    };
    let preprocessing = Preprocessing::new(normalization.into(), Transform { resize_px, size_px });
    let is_cropped = config["crop_mode"].as_str().is_none_or(|mode| mode == "center");
    Ok(Some(StatedPreprocessing { preprocessing, interpolation, is_cropped }))
}

/// Checks that a configuration states no activation except `supported`, the one that Ocelli's
/// networks have.
pub(crate) fn check_activation(source: &Source, supported: &str) -> Result<(), String> {
    let Some(config) = &source.config else { return Ok(()) };
    for key in ["hidden_act", "act_layer"] {
        let stated = [&config[key], &config["model_args"][key]].into_iter().find(|value| !value.is_null());
        if let Some(stated) = stated
            && stated != supported
        {
            return Err(format!("{key} is {stated}, but only {supported:?} is supported for such networks"));
        }
    }
    Ok(())
}

/// Keys of sizes in configurations of transformers and timm, each with the key in a model's
/// configuration that has the same meaning.
const SIZES: [(&str, &str); 6] = [
    ("hidden_size", "width"),
    ("num_hidden_layers", "depth"),
    ("patch_size", "patch_px"),
    ("embed_dim", "width"),
    ("depth", "depth"),
    ("num_features", "width"),
];

/// Checks that the sizes which the configuration of a transformer states agree with `model`, which
/// is determined by the weights.
///
/// # Errors
/// A message with the first that differs.
pub(crate) fn check_sizes(source: &Source, model: &ModelConfig) -> Result<(), String> {
    let Some(config) = &source.config else { return Ok(()) };
    let model = serde_json::to_value(model).unwrap_or_default();
    // Configurations of convolutional networks have other keys for widths and depths.
    if !model["heads"].is_number() {
        return Ok(());
    }
    for (key, model_key) in SIZES {
        let values = [&config[key], &config["model_args"][key]];
        let Some(stated) = values.into_iter().find(|value| value.is_number()) else { continue };
        if model[model_key].is_number() && stated.as_f64() != model[model_key].as_f64() {
            return Err(format!(
                "its configuration says {key} = {stated}, but the weights have {}: they belong to different \
                 networks",
                model[model_key]
            ));
        }
    }
    let has_no_qkv_bias = config["qkv_bias"] == false || config["model_args"]["qkv_bias"] == false;
    if has_no_qkv_bias && model["qkv_bias"] != "none" {
        return Err("its configuration says qkv_bias = false, but the weights have such biases".into());
    }
    Ok(())
}

/// Returns the term that layer norms add to the variance, if the configuration states it.
pub(crate) fn norm_epsilon(source: &Source) -> Result<Option<f64>, String> {
    let stated = source.config.as_ref().map_or(&Value::Null, |config| &config["layer_norm_eps"]);
    if stated.is_null() {
        return Ok(None);
    }
    let epsilon = stated.as_f64().filter(|epsilon| *epsilon > 0.0 && *epsilon < 1.0);
    epsilon
        .map(Some)
        .ok_or_else(|| format!("layer_norm_eps is {stated}, which is not a number between 0 and 1"))
}

/// Returns the count under the first key among `keys` that is present; `None` if all are absent.
pub(crate) fn count(config: &Value, keys: &[&str]) -> Result<Option<usize>, String> {
    let Some(key) = keys.iter().find(|key| !config[**key].is_null()) else { return Ok(None) };
    let value = &config[*key];
    let count = value.as_u64().and_then(|count| usize::try_from(count).ok()).filter(|count| *count > 0);
    count.map(Some).ok_or_else(|| format!("{key} is {value}, which is not a positive integer"))
}

/// Returns the mean and standard deviation of colors under two keys; `None` if both are absent.
fn normalization(config: &Value, mean_key: &str, std_key: &str) -> Result<Option<Normalization>, String> {
    let mean = &config[mean_key];
    let std = &config[std_key];
    if mean.is_null() && std.is_null() {
        return Ok(None);
    }
    let (Some(means), Some(stds)) = (numbers(mean), numbers(std)) else {
        return Err(format!(
            "{mean_key} is {mean} and {std_key} is {std}, but each needs one number per channel"
        ));
    };
    let normalization = Normalization { mean: means, std: stds };
    normalization.validate().map_err(|reason| format!("{mean_key}, {std_key}: {reason}"))?;
    Ok(Some(normalization))
}

/// Returns the elements of `value`; `None` if it is not an array of numbers.
fn numbers(value: &Value) -> Option<Vec<f32>> {
    value.as_array()?.iter().map(|value| Some(value.as_f64()? as f32)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn color_normalization(mean: &Value, std: &Value) -> Result<Option<Normalization>, String> {
        normalization(&json!({ "image_mean": mean, "image_std": std }), "image_mean", "image_std")
    }

    #[test]
    fn errors_of_normalizations_name_their_keys() {
        let valid = json!([0.5, 0.5, 0.5]);
        assert!(color_normalization(&valid, &valid).unwrap().is_some());
        assert!(color_normalization(&Value::Null, &Value::Null).unwrap().is_none());
        for (mean, std) in [
            (valid.clone(), json!([0, 0, 0])),
            (valid.clone(), json!([1e-44, 0.2, 0.2])),
            (json!([1e300, 0, 0]), valid.clone()),
            (json!(["a", "b", "c"]), valid.clone()),
            (json!([0.5, 0.5]), valid.clone()),
            (valid.clone(), Value::Null),
        ] {
            assert!(color_normalization(&mean, &std).unwrap_err().contains("image_std"), "{mean} {std}");
        }
    }

    /// Reads a configuration of transformers with a normalization.
    fn read(mut config: Value) -> StatedPreprocessing {
        config["image_mean"] = json!([0.5, 0.5, 0.5]);
        config["image_std"] = json!([0.5, 0.5, 0.5]);
        let fallback = Preprocessing::with_size(96, Normalization::default());
        transformers_preprocessing(&config, &fallback).unwrap().unwrap()
    }

    /// Returns the sizes of the resized image and of the crop.
    fn sizes(config: Value) -> [u32; 2] {
        let transform = read(config).preprocessing.transform;
        [transform.resize_px, transform.size_px]
    }

    fn square(px: u32) -> Value {
        json!({ "height": px, "width": px })
    }

    /// Sizes as the processors of DINOv2, ViT and ConvNeXT in transformers apply them.
    #[test]
    fn crop_is_read_from_its_size_or_its_ratio() {
        assert_eq!(sizes(json!({ "size": { "shortest_edge": 256 }, "crop_size": square(224) })), [256, 224]);
        assert_eq!(sizes(json!({ "size": square(224) })), [224, 224]);
        assert_eq!(sizes(json!({ "size": { "shortest_edge": 224 }, "crop_pct": 0.875 })), [256, 224]);
        assert_eq!(sizes(json!({ "size": { "shortest_edge": 384 }, "crop_pct": 0.95 })), [384, 384]);
    }

    /// Configurations by which a library makes squares of whole images are told from crops.
    #[test]
    fn squashed_images_are_told_from_crops() {
        for (config, is_cropped) in [
            (json!({ "size": { "shortest_edge": 256 }, "crop_size": square(224) }), true),
            (json!({ "size": square(224) }), false),
            (json!({ "size": { "shortest_edge": 224 }, "crop_pct": 0.875 }), true),
            (json!({ "size": { "shortest_edge": 384 }, "crop_pct": 0.95 }), false),
        ] {
            assert_eq!(read(config.clone()).is_cropped, is_cropped, "{config}");
        }
        for (mode, is_cropped) in [(json!("center"), true), (json!("squash"), false), (Value::Null, true)] {
            let colors = json!([0.5, 0.5, 0.5]);
            let config = json!({ "mean": colors, "std": colors, "crop_mode": mode });
            let fallback = Preprocessing::with_size(96, Normalization::default());
            let stated = timm_preprocessing(&config, &fallback).unwrap().unwrap();
            assert_eq!(stated.is_cropped, is_cropped, "{config}");
        }
    }
}
