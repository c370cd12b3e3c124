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
        match self.values.iter().all(|value| value.is_finite()) {
            true => Ok(()),
            false => Err(NetworkError::Weights {
                name: self.name.clone(),
                reason: "it holds numbers that are not finite".into(),
            }),
        }
    }
}

/// Returns the values of the parameter `name` among `tensors`, which must have the shape of `spec`.
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
    match tensor.shape == spec.shape && tensor.values.len() == spec.numel() {
        true => Ok(&tensor.values),
        false => Err(bad(format!("has shape {:?}, not {:?}", tensor.shape, spec.shape))),
    }
}

/// Maps names to `tensors`.
pub fn by_name(tensors: &[NamedTensor]) -> HashMap<&str, &NamedTensor> {
    tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect()
}
