//! Configurations of timm's folders.

use serde_json::{Value, json};

use crate::backbone::TimmModel;
use crate::decimal::decimal;
use crate::export::Export;

/// Returns the contents of a folder's `config.json`.
pub(super) fn config(model: &TimmModel, export: &Export<'_>) -> Value {
    let preprocessing = &export.preprocessing;
    let px = preprocessing.transform.size_px;
    json!({
        "architecture": model.architecture,
        "num_classes": 0,
        "num_features": export.model.width(),
        "global_pool": model.pool,
        "model_args": model.arguments,
        "pretrained_cfg": {
            "tag": "ocelli",
            "custom_load": false,
            "input_size": [3, px, px],
            "fixed_input_size": model.pool == "token",
            "interpolation": "bicubic",
            "crop_pct": preprocessing.crop_share(),
            "crop_mode": "center",
            "mean": preprocessing.normalization.mean.map(decimal),
            "std": preprocessing.normalization.std.map(decimal),
            "num_classes": 0,
            "pool_size": null,
            "first_conv": model.first_conv,
            "classifier": model.classifier,
        },
    })
}
