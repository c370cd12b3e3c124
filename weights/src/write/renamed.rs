//! The tensors of a network by other names.

use networks::NamedTensor;

use crate::export::Export;
use crate::file::{Array, Arrays};

/// The tensors by our names.
pub(super) fn ours(export: &Export<'_>) -> Arrays {
    renamed(export, |name| Some(name.to_string()))
}

/// The tensors by other names; those without one are left out.
pub(super) fn renamed(export: &Export<'_>, renaming: impl Fn(&str) -> Option<String>) -> Arrays {
    let named = |tensor: &NamedTensor| {
        let array = Array { shape: tensor.shape.clone(), values: tensor.values.clone() };
        Some((renaming(&tensor.name)?, array))
    };
    export.tensors.iter().filter_map(named).collect()
}
