//! Configurations of transformers' folders.

use serde_json::{Map, Value, json};

use super::classifier::NO_CLASSIFIER;
use crate::backbone::exchange_of;
use crate::decimal::decimals;
use crate::export::Export;
use crate::preprocessing::Preprocessing;

/// Returns the contents of `config.json`.
///
/// # Errors
/// A message, if transformers has no such network, or none with a classifier.
pub(super) fn config(export: &Export<'_>) -> Result<Value, String> {
    let exchange = exchange_of(export.model);
    let mut config = exchange.transformers()?;
    let Some(classifier) = &export.classifier else { return Ok(config) };
    let model = exchange.transformers_classifier().ok_or(NO_CLASSIFIER)?;
    let mut names = Map::new();
    let mut numbers = Map::new();
    for (number, class) in classifier.head.classes.iter().enumerate() {
        names.insert(number.to_string(), class.as_str().into());
        numbers.insert(class.clone(), number.into());
    }
    config["architectures"] = json!([model.architecture]);
    config["id2label"] = Value::Object(names);
    config["label2id"] = Value::Object(numbers);
    let is_multi_label = classifier.head.is_multi_label;
    let kind = if is_multi_label { "multi_label_classification" } else { "single_label_classification" };
    config["problem_type"] = json!(kind);
    Ok(config)
}

/// Returns the contents of `preprocessor_config.json`.
pub(super) fn preprocessor(export: &Export<'_>) -> Value {
    let preprocessing = &export.preprocessing;
    let normalization = &preprocessing.pixels.normalization;
    let px = preprocessing.transform.size_px;
    json!({
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": preprocessing.pixels.format().is_rgb8(),
        "do_resize": true,
        "size": { "shortest_edge": preprocessing.transform.resize_px },
        // Bicubic, by Pillow's number.
        "resample": 3,
        "do_center_crop": true,
        "crop_size": { "height": px, "width": px },
        "do_rescale": true,
        "rescale_factor": 1.0 / largest_value(preprocessing),
        "do_normalize": true,
        "image_mean": decimals(&normalization.mean),
        "image_std": decimals(&normalization.std),
    })
}
/// Returns the value of a pixel that becomes 1.
fn largest_value(preprocessing: &Preprocessing) -> f64 {
    match preprocessing.decoding.bits_used {
        Some(bits) => f64::from(u16::MAX >> (16 - bits)),
        None => f64::from(preprocessing.pixels.depth.unit()),
    }
}
