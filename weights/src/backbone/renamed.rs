//! Parameters of a network under other names.

use crate::export::Export;
use crate::file::{Array, Arrays};

/// Returns the parameters of `export` under the names that `library_names` returns. A parameter
/// with several names is split along its first dimension; one without a name is left out.
pub(super) fn renamed_arrays(export: &Export<'_>, library_names: impl Fn(&str) -> Vec<String>) -> Arrays {
    let mut arrays = Arrays::new();
    for tensor in export.tensors {
        let names = library_names(&tensor.name);
        if names.len() < 2 {
            for name in names {
                arrays.insert(name, Array { shape: tensor.shape.clone(), values: tensor.values.clone() });
            }
            continue;
        }
        let len = tensor.values.len() / names.len();
        let mut shape = tensor.shape.clone();
        shape[0] /= names.len();
        for (name, values) in names.into_iter().zip(tensor.values.chunks_exact(len.max(1))) {
            arrays.insert(name, Array { shape: shape.clone(), values: values.to_vec() });
        }
    }
    arrays
}

/// Returns the parameters of `export` under Ocelli's names.
pub(crate) fn ocelli_arrays(export: &Export<'_>) -> Arrays {
    renamed_arrays(export, same_name)
}

/// Returns the names in a library that has Ocelli's names.
pub(super) fn same_name(name: &str) -> Vec<String> {
    vec![name.to_string()]
}
