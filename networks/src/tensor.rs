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
    /// Checks that all values are finite: one value that is not makes all features meaningless.
    ///
    /// # Errors
    /// [`NetworkError::Weights`].
    pub fn check_finite(&self) -> Result<(), NetworkError> {
        if self.values.iter().all(|value| value.is_finite()) {
            Ok(())
        } else {
            Err(NetworkError::Weights {
                name: self.name.clone(),
                reason: "it holds numbers that are not finite".into(),
            })
        }
    }
}

/// Returns the values of the whole parameter `name` among `tensors`, which must have the shape of
/// that of `spec`.
///
/// # Errors
/// [`NetworkError::Weights`].
pub fn values_of<'a>(
    tensors: &HashMap<&str, &'a NamedTensor>,
    name: &str,
    spec: &ParamSpec,
) -> Result<&'a [f32], NetworkError> {
    let bad = |reason: String| NetworkError::Weights { name: name.into(), reason };
    let tensor = tensors.get(name).ok_or_else(|| bad("is missing".into()))?;
    let shape = spec.whole_shape();
    if tensor.shape == shape && tensor.values.len() == shape.iter().product::<usize>() {
        Ok(&tensor.values)
    } else {
        Err(bad(format!("has shape {:?}, not {shape:?}", tensor.shape)))
    }
}

/// Joins tensors of the same name and row length, which are rows of one parameter in their order.
pub fn joined(tensors: Vec<NamedTensor>) -> Vec<NamedTensor> {
    let mut positions: HashMap<String, usize> = HashMap::new();
    let mut joined: Vec<NamedTensor> = Vec::new();
    for tensor in tensors {
        let whole = positions.get(&tensor.name).map(|position| &mut joined[*position]);
        let whole = whole.filter(|whole| whole.shape.get(1..) == tensor.shape.get(1..));
        match whole
            .and_then(|whole| Some((whole.shape.first_mut()?, &mut whole.values, tensor.shape.first()?)))
        {
            Some((n_rows, values, more)) => {
                *n_rows = n_rows.saturating_add(*more);
                values.extend(tensor.values);
            }
            None => {
                positions.insert(tensor.name.clone(), joined.len());
                joined.push(tensor);
            }
        }
    }
    joined
}

/// Maps names to `tensors`.
pub fn by_name(tensors: &[NamedTensor]) -> HashMap<&str, &NamedTensor> {
    tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect()
}
