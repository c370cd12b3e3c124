//! The metadata of a file.

use std::collections::HashMap;

use crate::backbone::exchange_of;
use crate::export::Export;
use crate::metadata::{MODEL, NETWORK, NORMALIZATION, POOLING, PREPROCESSING};

/// Returns the metadata of `export`.
pub(super) fn entries(export: &Export<'_>) -> HashMap<String, String> {
    let json = |value: serde_json::Result<String>| value.unwrap_or_default();
    HashMap::from([
        (MODEL.into(), json(serde_json::to_string(export.model))),
        (PREPROCESSING.into(), json(serde_json::to_string(&export.preprocessing))),
        (NORMALIZATION.into(), json(serde_json::to_string(&export.preprocessing.pixels.normalization))),
        (NETWORK.into(), export.which.into()),
        (POOLING.into(), exchange_of(export.model).pooling().into()),
        ("format".into(), "pt".into()),
    ])
}
