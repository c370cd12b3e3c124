//! Configuration files of timm and transformers.

use augment::{Depth, Transform};
use networks::{ModelConfig, Normalization, Pixels};
use serde_json::Value;

use super::Source;
use crate::preprocessing::Preprocessing;

/// Size from which on the processor of ConvNeXT in transformers resizes images without a crop.
const UNCROPPED_PX: u32 = 384;

/// Returns the preprocessing stated by `source`, or `otherwise` if it states none; adds a sentence
/// for each assumption.
pub(crate) fn preprocessing(
    source: &Source,
    otherwise: Preprocessing,
    is_known: bool,
    assumed: &mut Vec<String>,
) -> Result<Preprocessing, String> {
    let mut said = match &source.preprocessor {
        Some(said) => of_transformers(said, &otherwise)?,
        None => None,
    };
    if let (None, Some(config)) = (&said, &source.config) {
        said = of_timm(config, &otherwise)?;
    }
    let Some((preprocessing, interpolation)) = said else {
        if !is_known {
            assumed.push(
                "the file does not say how colors are normalized: ImageNet's mean and deviation are taken \
                 (--normalization)"
                    .into(),
            );
        }
        return Ok(otherwise);
    };
    if interpolation != "bicubic" {
        assumed
            .push(format!("it was made with {interpolation} resizing; images are resized bicubically here"));
    }
    Ok(preprocessing)
}

/// Returns the preprocessing of `preprocessor_config.json`, if it has one, and the name of its
/// interpolation.
fn of_transformers(
    said: &Value,
    otherwise: &Preprocessing,
) -> Result<Option<(Preprocessing, &'static str)>, String> {
    let Some(normalization) = normalization(said, ["image_mean", "image_std"])? else { return Ok(None) };
    let side = |value: &Value| {
        let sides = ["shortest_edge", "height"].into_iter().filter_map(|key| value[key].as_u64());
        sides.chain(value.as_u64()).next().map(|side| u32::try_from(side).unwrap_or(u32::MAX))
    };
    let stated_px = side(&said["size"]).unwrap_or(otherwise.transform.resize_px);
    let crops = said["do_center_crop"].as_bool().unwrap_or(said["crop_size"].is_object());
    let share = said["crop_pct"].as_f64().filter(|share| (0.1..=1.0).contains(share));
    let (resize_px, size_px) = match share {
        _ if crops => (stated_px, side(&said["crop_size"]).unwrap_or(stated_px)),
        // ConvNeXT's processor: the stated size is that of the crop, below a size that it does not
        // crop.
        Some(share) if stated_px < UNCROPPED_PX => ((f64::from(stated_px) / share).floor() as u32, stated_px),
        _ => (stated_px, stated_px),
    };
    // Pillow's numbers.
    let interpolation = match said["resample"].as_u64() {
        Some(2) => "bilinear",
        Some(1) => "Lanczos",
        Some(0) => "nearest",
        _ => "bicubic",
    };
    let factor = said["rescale_factor"].as_f64();
    let is_wide = factor.is_some_and(|factor| (factor * 65_535.0 - 1.0).abs() < 1e-3);
    let pixels = Pixels { normalization, depth: if is_wide { Depth::Sixteen } else { Depth::Eight } };
    Ok(Some((Preprocessing::new(pixels, Transform { resize_px, size_px }), interpolation)))
}

/// Returns the preprocessing of timm's `config.json`, if it has one, and the name of its
/// interpolation.
fn of_timm(
    config: &Value,
    otherwise: &Preprocessing,
) -> Result<Option<(Preprocessing, &'static str)>, String> {
    let config = config.get("pretrained_cfg").unwrap_or(config);
    let Some(normalization) = normalization(config, ["mean", "std"])? else { return Ok(None) };
    let size_px = config["input_size"][2]
        .as_u64()
        .map_or(otherwise.transform.size_px, |side| u32::try_from(side).unwrap_or(u32::MAX));
    let share = config["crop_pct"].as_f64().filter(|share| (0.1..=1.0).contains(share)).unwrap_or(0.875);
    let resize_px = (f64::from(size_px) / share).floor() as u32;
    let interpolation = match config["interpolation"].as_str() {
        Some("bilinear") => "bilinear",
        _ => "bicubic",
    };
    Ok(Some((Preprocessing::new(normalization.into(), Transform { resize_px, size_px }), interpolation)))
}

/// Checks that a configuration names no activation but `known`, the one that Ocelli's networks
/// have.
pub(crate) fn check_activation(source: &Source, known: &str) -> Result<(), String> {
    let Some(config) = &source.config else { return Ok(()) };
    for key in ["hidden_act", "act_layer"] {
        let said = [&config[key], &config["model_args"][key]].into_iter().find(|said| !said.is_null());
        if let Some(said) = said.filter(|said| *said != known) {
            return Err(format!("{key} is {said}, but only {known:?} is supported for such networks"));
        }
    }
    Ok(())
}

/// Sizes that a configuration states, and the keys of a model that they are: of transformers, and
/// of timm.
const SIZES: [(&str, &str); 6] = [
    ("hidden_size", "width"),
    ("num_hidden_layers", "depth"),
    ("patch_size", "patch_px"),
    ("embed_dim", "width"),
    ("depth", "depth"),
    ("num_features", "width"),
];

/// Checks that the sizes which a configuration of a transformer states are those of the weights,
/// which decide them.
///
/// # Errors
/// A message with the first that differs.
pub(crate) fn check_sizes(source: &Source, model: &ModelConfig) -> Result<(), String> {
    let Some(config) = &source.config else { return Ok(()) };
    let model = serde_json::to_value(model).unwrap_or_default();
    // Convolutional networks have other words for widths and depths.
    if !model["heads"].is_number() {
        return Ok(());
    }
    for (key, of_model) in SIZES {
        let places = [&config[key], &config["model_args"][key]];
        let Some(said) = places.into_iter().find(|said| said.is_number()) else { continue };
        if model[of_model].is_number() && said.as_f64() != model[of_model].as_f64() {
            return Err(format!(
                "its configuration says {key} = {said}, and the weights have {}: they are of different networks",
                model[of_model]
            ));
        }
    }
    let has_none = config["qkv_bias"] == false || config["model_args"]["qkv_bias"] == false;
    if has_none && model["qkv_bias"] != "none" {
        return Err("its configuration says qkv_bias = false, and the weights have such biases".into());
    }
    Ok(())
}

/// Returns the term that layer norms add to the variance, if the configuration states it.
pub(crate) fn norm_epsilon(source: &Source) -> Result<Option<f64>, String> {
    let said = source.config.as_ref().map_or(&Value::Null, |config| &config["layer_norm_eps"]);
    if said.is_null() {
        return Ok(None);
    }
    let epsilon = said.as_f64().filter(|epsilon| *epsilon > 0.0 && *epsilon < 1.0);
    epsilon
        .map(Some)
        .ok_or_else(|| format!("layer_norm_eps is {said}, which is not a number between 0 and 1"))
}

/// Returns the count under the first present of several keys; `None` if all are absent.
pub(crate) fn count(config: &Value, keys: &[&str]) -> Result<Option<usize>, String> {
    let Some((key, said)) = keys.iter().map(|key| (key, &config[*key])).find(|(_, said)| !said.is_null())
    else {
        return Ok(None);
    };
    let count = said.as_u64().and_then(|count| usize::try_from(count).ok()).filter(|count| *count > 0);
    count.map(Some).ok_or_else(|| format!("{key} is {said}, which is not a positive integer"))
}

/// Returns the mean and standard deviation of colors under two keys; `None` if both are absent.
fn normalization(said: &Value, keys: [&str; 2]) -> Result<Option<Normalization>, String> {
    let [mean, std] = keys.map(|key| &said[key]);
    if mean.is_null() && std.is_null() {
        return Ok(None);
    }
    let numbers = |value: &Value| -> Option<Vec<f32>> {
        value.as_array()?.iter().map(|value| Some(value.as_f64()? as f32)).collect()
    };
    let [mean_key, std_key] = keys;
    let (Some(mean), Some(std)) = (numbers(mean), numbers(std)) else {
        return Err(format!(
            "{mean_key} is {mean} and {std_key} is {std}: a number for each channel is needed"
        ));
    };
    let normalization = Normalization { mean, std };
    normalization.validate().map_err(|reason| format!("{mean_key}, {std_key}: {reason}"))?;
    Ok(Some(normalization))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn colors_that_make_no_numbers_are_refused_by_name() {
        let of = |mean: Value, std: Value| {
            normalization(&json!({ "image_mean": mean, "image_std": std }), ["image_mean", "image_std"])
        };
        let usual = || json!([0.5, 0.5, 0.5]);
        assert!(of(usual(), usual()).unwrap().is_some());
        assert!(of(Value::Null, Value::Null).unwrap().is_none());
        for (mean, std) in [
            (usual(), json!([0, 0, 0])),
            (usual(), json!([1e-44, 0.2, 0.2])),
            (json!([1e300, 0, 0]), usual()),
            (json!(["a", "b", "c"]), usual()),
            (json!([0.5, 0.5]), usual()),
            (usual(), Value::Null),
        ] {
            assert!(of(mean.clone(), std.clone()).unwrap_err().contains("image_std"), "{mean} {std}");
        }
    }

    /// Sizes as the processors of DINOv2, ViT and ConvNeXT in transformers apply them.
    #[test]
    fn a_crop_is_stated_by_its_size_or_by_its_share() {
        let otherwise = Preprocessing::of_size(96, Normalization::default());
        let sizes = |mut said: Value| {
            said["image_mean"] = json!([0.5, 0.5, 0.5]);
            said["image_std"] = json!([0.5, 0.5, 0.5]);
            let (found, _) = of_transformers(&said, &otherwise).unwrap().unwrap();
            [found.transform.resize_px, found.transform.size_px]
        };
        let side = |px: u32| json!({ "height": px, "width": px });
        assert_eq!(sizes(json!({ "size": { "shortest_edge": 256 }, "crop_size": side(224) })), [256, 224]);
        assert_eq!(sizes(json!({ "size": side(224) })), [224, 224]);
        assert_eq!(sizes(json!({ "size": { "shortest_edge": 224 }, "crop_pct": 0.875 })), [256, 224]);
        assert_eq!(sizes(json!({ "size": { "shortest_edge": 384 }, "crop_pct": 0.95 })), [384, 384]);
    }
}
