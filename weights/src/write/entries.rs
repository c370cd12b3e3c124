//! The metadata of a file.

use std::collections::HashMap;

use crate::backbone::exchange_of;
use crate::export::Export;
use crate::metadata::{
    CLASSES, DECODER, LICENSE, MODEL, NETWORK, NORMALIZATION, ORIGINS, PIXEL_CLASSES, POOLING, PREPROCESSING,
    PROBABILITIES, SIGMOID,
};

/// Returns the metadata of `export`.
pub(super) fn entries(export: &Export<'_>) -> HashMap<String, String> {
    let normalization = &export.preprocessing.pixels.normalization;
    let mut entries = HashMap::from([
        (MODEL.into(), serde_json::to_string(export.model).unwrap_or_default()),
        (PREPROCESSING.into(), serde_json::to_string(&export.preprocessing).unwrap_or_default()),
        (NORMALIZATION.into(), serde_json::to_string(normalization).unwrap_or_default()),
        (NETWORK.into(), export.network_name.into()),
        (POOLING.into(), exchange_of(export.model).pooling().into()),
        ("format".into(), "pt".into()),
    ]);
    if let Some(classifier) = &export.classifier {
        let classes = &classifier.head.classes;
        entries.insert(CLASSES.into(), serde_json::to_string(classes).unwrap_or_default());
        if classifier.head.is_multi_label {
            entries.insert(PROBABILITIES.into(), SIGMOID.into());
        }
    }
    if let Some(head) = export.decoder {
        entries.insert(PIXEL_CLASSES.into(), serde_json::to_string(&head.classes).unwrap_or_default());
        entries.insert(DECODER.into(), serde_json::to_string(&head.decoder).unwrap_or_default());
    }
    let origins = &export.card.origins;
    if !origins.is_empty() {
        entries.insert(ORIGINS.into(), serde_json::to_string(origins).unwrap_or_default());
    }
    let mut licenses: Vec<&str> = Vec::new();
    for license in origins.iter().filter_map(|origin| origin.license.as_deref()) {
        // An origin that itself began with several weights states the licenses of all.
        licenses.extend(license.split(", "));
    }
    licenses.sort_unstable();
    licenses.dedup();
    if !licenses.is_empty() {
        entries.insert(LICENSE.into(), licenses.join(", "));
    }
    entries
}
