//! Weights of a shard, and their copy in bf16 that products read.

use burn_tensor::Tensor;

/// Weights of a shard, `[n]` in f32, with a copy in bf16 where the update has written both.
///
/// Any other write to the values drops the copy, so that it never differs from them.
#[derive(Debug, Clone)]
pub struct ShardWeights {
    values: Tensor<1>,
    in_bf16: Option<Tensor<1>>,
}

impl ShardWeights {
    /// Creates weights from the `values` of an update and, where it has rounded them, their copy.
    #[cfg(feature = "cuda")]
    pub(super) fn updated(values: Tensor<1>, in_bf16: Option<Tensor<1>>) -> Self {
        Self { values, in_bf16 }
    }

    /// The values.
    pub fn values(&self) -> &Tensor<1> {
        &self.values
    }

    /// The values rounded to bf16, where the update has written them.
    pub fn in_bf16(&self) -> Option<&Tensor<1>> {
        self.in_bf16.as_ref()
    }

    /// Returns the values for writing, and drops their copy.
    pub fn values_mut(&mut self) -> &mut Tensor<1> {
        self.in_bf16 = None;
        &mut self.values
    }
}

impl From<Tensor<1>> for ShardWeights {
    fn from(values: Tensor<1>) -> Self {
        Self { values, in_bf16: None }
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::{DType, Device};

    use super::*;

    /// Products would silently use an outdated copy.
    #[test]
    fn writing_the_values_drops_the_copy() {
        let values = Tensor::<1>::from_floats([1.0, 2.5], &Device::flex());
        let copy = Some(values.clone().cast(DType::BF16));
        let mut weights = ShardWeights { values, in_bf16: copy };
        assert!(weights.in_bf16().is_some() && weights.clone().in_bf16().is_some());
        let other = weights.values().clone().add_scalar(1.0);
        assert!(ShardWeights::from(other).in_bf16().is_none());
        kernels::device::host::assign(weights.values_mut(), 0, &Tensor::from_floats([3.0], &Device::flex()));
        assert!(weights.in_bf16().is_none());
    }
}
