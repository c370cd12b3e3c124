//! Parameters of a network under other names.

use crate::export::Export;
use crate::file::{Array, Arrays};

/// Returns the parameters of `export` under other names. A parameter with several names is split
/// along its first dimension; one without a name is left out.
pub(super) fn renamed(export: &Export<'_>, names: impl Fn(&str) -> Vec<String>) -> Arrays {
    let mut arrays = Arrays::new();
    for tensor in export.tensors {
        let theirs = names(&tensor.name);
        if theirs.len() < 2 {
            let whole = || Array { shape: tensor.shape.clone(), values: tensor.values.clone() };
            arrays.extend(theirs.into_iter().map(|name| (name, whole())));
            continue;
        }
        let len = tensor.values.len() / theirs.len();
        let mut shape = tensor.shape.clone();
        shape[0] /= theirs.len();
        for (name, values) in theirs.into_iter().zip(tensor.values.chunks_exact(len.max(1))) {
            arrays.insert(name, Array { shape: shape.clone(), values: values.to_vec() });
        }
    }
    arrays
}

/// Returns the parameters of `export` under Ocelli's names.
pub(crate) fn ours(export: &Export<'_>) -> Arrays {
    renamed(export, |name| vec![name.to_string()])
}
