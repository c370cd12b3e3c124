//! What the configurations of timm and transformers say.

use serde_json::Value;
use trainer::Normalization;

use super::source::Source;
use crate::preprocessing::Preprocessing;

/// The preprocessing that `source` says, or `otherwise` with a sentence about it.
pub(super) fn preprocessing(
    source: &Source,
    otherwise: Preprocessing,
    is_known: bool,
    assumed: &mut Vec<String>,
) -> Preprocessing {
    let said = source
        .preprocessor
        .as_ref()
        .and_then(|said| of_transformers(said, otherwise))
        .or_else(|| of_timm(source.config.as_ref()?, otherwise));
    let Some((preprocessing, interpolation)) = said else {
        if !is_known {
            assumed.push(
                "the file does not say how colors are normalized: ImageNet's mean and deviation are taken \
                 (--normalization)"
                    .into(),
            );
        }
        return otherwise;
    };
    if interpolation != "bicubic" {
        assumed
            .push(format!("it was made with {interpolation} resizing; images are resized bicubically here"));
    }
    preprocessing
}

/// Of `preprocessor_config.json`, and the name of its interpolation.
fn of_transformers(said: &Value, otherwise: Preprocessing) -> Option<(Preprocessing, &'static str)> {
    let normalization = normalization(&said["image_mean"], &said["image_std"])?;
    let side = |value: &Value| {
        let sides = ["shortest_edge", "height"].into_iter().filter_map(|key| value[key].as_u64());
        sides.chain(value.as_u64()).next().map(|side| side as u32)
    };
    let resize_px = side(&said["size"]).unwrap_or(otherwise.resize_px);
    let crops = said["do_center_crop"].as_bool().unwrap_or(said["crop_size"].is_object());
    let size_px = match crops {
        true => side(&said["crop_size"]).unwrap_or(resize_px),
        false => resize_px,
    };
    // Pillow's numbers.
    let interpolation = match said["resample"].as_u64() {
        Some(2) => "bilinear",
        Some(1) => "Lanczos",
        Some(0) => "nearest",
        _ => "bicubic",
    };
    Some((Preprocessing { normalization, resize_px, size_px }, interpolation))
}

/// Of timm's `config.json`, and the name of its interpolation.
fn of_timm(config: &Value, otherwise: Preprocessing) -> Option<(Preprocessing, &'static str)> {
    let config = config.get("pretrained_cfg").unwrap_or(config);
    let normalization = normalization(&config["mean"], &config["std"])?;
    let size_px = config["input_size"][2].as_u64().map_or(otherwise.size_px, |side| side as u32);
    let share = config["crop_pct"].as_f64().filter(|share| (0.1..=1.0).contains(share)).unwrap_or(0.875);
    let resize_px = (f64::from(size_px) / share).floor() as u32;
    let interpolation = match config["interpolation"].as_str() {
        Some("bilinear") => "bilinear",
        _ => "bicubic",
    };
    Some((Preprocessing { normalization, resize_px, size_px }, interpolation))
}

fn normalization(mean: &Value, std: &Value) -> Option<Normalization> {
    let three = |value: &Value| {
        let numbers: Vec<f32> = value.as_array()?.iter().filter_map(|v| Some(v.as_f64()? as f32)).collect();
        <[f32; 3]>::try_from(numbers).ok()
    };
    let std = three(std)?;
    std.iter().all(|value| *value > 0.0).then_some(Normalization { mean: three(mean)?, std })
}
