//! Configurations of transformers' folders.

use serde_json::{Value, json};

use crate::decimal::decimal;
use crate::export::Export;

/// Returns the contents of `preprocessor_config.json`.
pub(super) fn preprocessor(export: &Export<'_>) -> Value {
    let preprocessing = &export.preprocessing;
    let px = preprocessing.transform.size_px;
    json!({
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": true,
        "do_resize": true,
        "size": { "shortest_edge": preprocessing.transform.resize_px },
        // Bicubic, by Pillow's number.
        "resample": 3,
        "do_center_crop": true,
        "crop_size": { "height": px, "width": px },
        "do_rescale": true,
        "rescale_factor": 1.0 / 255.0,
        "do_normalize": true,
        "image_mean": preprocessing.normalization.mean.map(decimal),
        "image_std": preprocessing.normalization.std.map(decimal),
    })
}
