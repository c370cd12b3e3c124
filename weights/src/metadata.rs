//! What goes with weights into the metadata of a file.

use std::collections::HashMap;

use crate::export::Export;

/// Key of the backbone's description, in a file with our names.
pub(crate) const MODEL: &str = "ocelli.model";

/// Key of the preprocessing.
pub(crate) const PREPROCESSING: &str = "ocelli.preprocessing";

/// Key of the normalization of colors, which older files say alone.
pub(crate) const NORMALIZATION: &str = "ocelli.normalization";

/// Key of which network of a run a file holds.
pub(crate) const NETWORK: &str = "ocelli.network";

/// Key of how tokens or cells become one vector.
const POOLING: &str = "ocelli.pooling";

/// Name of a network in a file that does not say which network of a run it holds.
pub(crate) const UNNAMED: &str = "weights";

/// The metadata of `export`.
pub(crate) fn of(export: &Export<'_>) -> HashMap<String, String> {
    let json = |value: serde_json::Result<String>| value.unwrap_or_default();
    HashMap::from([
        (MODEL.into(), json(serde_json::to_string(export.model))),
        (PREPROCESSING.into(), json(serde_json::to_string(&export.preprocessing))),
        (NORMALIZATION.into(), json(serde_json::to_string(&export.preprocessing.normalization))),
        (NETWORK.into(), export.which.into()),
        (POOLING.into(), pooling(export).into()),
        ("format".into(), "pt".into()),
    ])
}

/// How one vector is made of an image's features.
pub(crate) fn pooling(export: &Export<'_>) -> &'static str {
    match has_class_token(export) {
        true => "class token",
        false => "mean over the last feature map",
    }
}

pub(crate) fn has_class_token(export: &Export<'_>) -> bool {
    export.tensors.iter().any(|tensor| tensor.name == "cls_token")
}
