//! The head of a trained classifier, outside of any unit.

use crate::error::NetworkError;
use crate::tensor::{NamedTensor, by_name, values_with_shape};

/// A linear layer on the features of a backbone, which scores classes.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassHead {
    /// Names of the classes, in the order of the rows of the weight.
    pub classes: Vec<String>,
    /// Weight, `[C, D]` in row-major order.
    pub weight: Vec<f32>,
    /// Bias, `[C]`.
    pub bias: Vec<f32>,
    /// Whether an image may have several classes, or none: the probability of each class is then
    /// the sigmoid of its score. Otherwise, probabilities are the softmax of all scores.
    pub is_multi_label: bool,
}

impl ClassHead {
    /// Name of the unit of a classifier's head, in timm's names.
    pub const UNIT: &str = "head";

    /// Name of its weight.
    pub const WEIGHT: &str = "head.weight";

    /// Name of its bias.
    pub const BIAS: &str = "head.bias";

    /// Takes the head of `classes`, of which an image may have several if `is_multi_label` is set,
    /// from `tensors`, the parameters of a network with its heads, whose features have `width`
    /// channels.
    ///
    /// # Errors
    /// [`NetworkError::Weights`] for a parameter that is missing or has another shape.
    pub fn from_tensors(
        classes: Vec<String>,
        is_multi_label: bool,
        width: usize,
        tensors: &[NamedTensor],
    ) -> Result<Self, NetworkError> {
        let tensors = by_name(tensors);
        let weight = values_with_shape(&tensors, Self::WEIGHT, &[classes.len(), width])?.to_vec();
        let bias = values_with_shape(&tensors, Self::BIAS, &[classes.len()])?.to_vec();
        Ok(Self { classes, weight, bias, is_multi_label })
    }

    /// Returns the parameters under the names that [`from_tensors`](Self::from_tensors) takes.
    pub fn tensors(&self) -> Vec<NamedTensor> {
        let n_classes = self.classes.len();
        let weight = NamedTensor {
            name: Self::WEIGHT.into(),
            shape: vec![n_classes, self.width()],
            values: self.weight.clone(),
        };
        let bias = NamedTensor { name: Self::BIAS.into(), shape: vec![n_classes], values: self.bias.clone() };
        vec![weight, bias]
    }

    /// Returns the number of channels of the features, D.
    pub fn width(&self) -> usize {
        self.weight.len() / self.classes.len().max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, shape: &[usize]) -> NamedTensor {
        let values = vec![0.5; shape.iter().product()];
        NamedTensor { name: name.into(), shape: shape.to_vec(), values }
    }

    #[test]
    fn a_head_is_taken_from_the_parameters_of_its_network() {
        let classes = vec!["cat".to_string(), "dog".to_string()];
        let backbone = tensor("norm.weight", &[3]);
        let weight = tensor("head.weight", &[2, 3]);
        let bias = tensor("head.bias", &[2]);
        let tensors = [backbone.clone(), weight.clone(), bias];
        let head = ClassHead::from_tensors(classes.clone(), true, 3, &tensors).unwrap();
        assert_eq!((head.width(), head.weight.len(), head.bias.len()), (3, 6, 2));
        assert_eq!(ClassHead::from_tensors(classes.clone(), true, 3, &head.tensors()).unwrap(), head);
        for (tensors, words) in [
            (vec![backbone, weight.clone()], "head.bias is missing"),
            (vec![weight, tensor("head.bias", &[4])], "head.bias has shape [4], not [2]"),
        ] {
            let error = ClassHead::from_tensors(classes.clone(), false, 3, &tensors).unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}
