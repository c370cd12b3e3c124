//! Configurations of timm's folders.

use serde_json::{Value, json};

use crate::backbone::{TimmModel, exchange_of};
use crate::decimal::decimals;
use crate::export::Export;
use crate::library::Library;

/// Returns the contents of a folder's `config.json`.
pub(super) fn config(model: &TimmModel, export: &Export<'_>) -> Value {
    let preprocessing = &export.preprocessing;
    let normalization = &preprocessing.pixels.normalization;
    let px = preprocessing.transform.size_px;
    let n_classes = export.classifier.map_or(0, |classifier| classifier.head.classes.len());
    let mut config = json!({
        "architecture": model.architecture,
        "num_classes": n_classes,
        "num_features": export.model.width(),
        "global_pool": model.pool,
        "model_args": model.arguments,
        "pretrained_cfg": {
            "tag": "ocelli",
            "custom_load": false,
            "input_size": [export.model.n_channels(), px, px],
            "fixed_input_size": model.pool == "token",
            "interpolation": "bicubic",
            "crop_pct": preprocessing.crop_ratio(),
            "crop_mode": "center",
            "mean": decimals(&normalization.mean),
            "std": decimals(&normalization.std),
            "num_classes": n_classes,
            "pool_size": null,
            "first_conv": model.first_conv,
            "classifier": exchange_of(export.model).classifier(Library::Timm),
        },
    });
    if let Some(classifier) = &export.classifier {
        config["label_names"] = json!(classifier.head.classes);
    }
    config
}
