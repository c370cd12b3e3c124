//! Configurations of transformers' folders.

use serde_json::{Value, json};

use crate::decimal::decimals;
use crate::export::Export;

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
        "rescale_factor": 1.0 / f64::from(preprocessing.pixels.depth.unit()),
        "do_normalize": true,
        "image_mean": decimals(&normalization.mean),
        "image_std": decimals(&normalization.std),
    })
}
