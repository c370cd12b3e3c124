//! The classifier of a network among its parameters, under the names of a library.

use networks::ClassHead;

use crate::backbone::{TransformersClassifier, exchange_of};
use crate::export::Export;
use crate::file::{Array, Arrays};
use crate::library::Library;

/// Reason that a library cannot hold a classifier, and what to do.
pub(super) const NO_CLASSIFIER: &str =
    "it has no classifier on such a network; `ocelli export --backbone-only` leaves the classifier out";

/// Adds the classifier `head` to `arrays`, the parameters of the network of `export` under the
/// names of `library`.
///
/// # Errors
/// A message, if the library's network has no classifier.
pub(super) fn add(
    mut arrays: Arrays,
    library: Library,
    export: &Export<'_>,
    head: &ClassHead,
) -> Result<Arrays, String> {
    let exchange = exchange_of(export.model);
    let n_classes = head.classes.len();
    let mut weight = Array { shape: vec![n_classes, head.width()], values: head.weight.clone() };
    let layer = if library == Library::Transformers {
        let Some(TransformersClassifier { backbone, layer, reads_patches, .. }) =
            exchange.transformers_classifier()
        else {
            return Err(NO_CLASSIFIER.into());
        };
        arrays = with_prefix(arrays, backbone);
        if reads_patches {
            weight = with_zeros(head);
        }
        layer
    } else {
        exchange.classifier(library).ok_or(NO_CLASSIFIER)?
    };
    arrays.insert(format!("{layer}.weight"), weight);
    arrays.insert(format!("{layer}.bias"), Array { shape: vec![n_classes], values: head.bias.clone() });
    Ok(arrays)
}

/// Returns `arrays` as parameters of the module `module`.
fn with_prefix(arrays: Arrays, module: &str) -> Arrays {
    arrays.into_iter().map(|(name, array)| (format!("{module}.{name}"), array)).collect()
}

/// Returns the weight of `head` for features after which as many channels follow that do not
/// matter, `[C, 2·D]`.
fn with_zeros(head: &ClassHead) -> Array {
    let width = head.width();
    let mut values = Vec::with_capacity(2 * head.weight.len());
    for row in head.weight.chunks_exact(width.max(1)) {
        values.extend_from_slice(row);
        values.resize(values.len() + width, 0.0);
    }
    Array { shape: vec![head.classes.len(), 2 * width], values }
}
