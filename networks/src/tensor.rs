//! Parameters with their values, outside of any unit.

use std::collections::HashMap;

use crate::error::NetworkError;
use crate::params::ParamSpec;

/// A parameter with its values.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedTensor {
    /// Name in timm or torchvision.
    pub name: String,
    /// Dimensions, as PyTorch stores them.
    pub shape: Vec<usize>,
    /// Elements in row-major order.
    pub values: Vec<f32>,
}

impl NamedTensor {
    /// Checks that all values are finite: a single infinity or NaN makes all features meaningless.
    ///
    /// # Errors
    /// [`NetworkError::Weights`].
    pub fn check_finite(&self) -> Result<(), NetworkError> {
        if self.values.iter().all(|value| value.is_finite()) {
            Ok(())
        } else {
            Err(NetworkError::Weights {
                name: self.name.clone(),
                reason: "it has values that are not finite".into(),
            })
        }
    }
}

/// Returns the values of the parameter `name` among `tensors`, which must have the shape of the
/// whole parameter of `spec`.
///
/// # Errors
/// [`NetworkError::Weights`].
pub fn values_of<'a>(
    tensors: &HashMap<&str, &'a NamedTensor>,
    name: &str,
    spec: &ParamSpec,
) -> Result<&'a [f32], NetworkError> {
    values_with_shape(tensors, name, &spec.whole_shape())
}

/// Returns the values of the parameter `name` among `tensors`, which must have this `shape`.
///
/// # Errors
/// [`NetworkError::Weights`].
pub(crate) fn values_with_shape<'a>(
    tensors: &HashMap<&str, &'a NamedTensor>,
    name: &str,
    shape: &[usize],
) -> Result<&'a [f32], NetworkError> {
    let Some(tensor) = tensors.get(name) else {
        return Err(NetworkError::Weights { name: name.into(), reason: "is missing".into() });
    };
    if tensor.shape == shape && tensor.values.len() == shape.iter().product::<usize>() {
        Ok(&tensor.values)
    } else {
        let reason = format!("has shape {:?}, not {shape:?}", tensor.shape);
        Err(NetworkError::Weights { name: name.into(), reason })
    }
}

/// Joins tensors of the same name and row length, which are rows of one parameter in their order.
pub fn joined(tensors: Vec<NamedTensor>) -> Vec<NamedTensor> {
    let mut positions: HashMap<String, usize> = HashMap::new();
    let mut joined: Vec<NamedTensor> = Vec::new();
    for tensor in tensors {
        let first = positions.get(&tensor.name).map(|position| &mut joined[*position]);
        if let Some(first) = first
            && let Some((n_rows, first_row_shape)) = first.shape.split_first_mut()
            && let Some((n_more_rows, row_shape)) = tensor.shape.split_first()
            && *first_row_shape == *row_shape
        {
            *n_rows = n_rows.saturating_add(*n_more_rows);
            first.values.extend(tensor.values);
            continue;
        }
        positions.insert(tensor.name.clone(), joined.len());
        joined.push(tensor);
    }
    joined
}

/// Maps names to `tensors`.
pub fn by_name(tensors: &[NamedTensor]) -> HashMap<&str, &NamedTensor> {
    tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect()
}
