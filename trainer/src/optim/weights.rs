//! Weights of a shard, and the copy of them that products read.

use burn_tensor::Tensor;

/// Weights of a shard, `[n]` in f32, with the same values in bf16 where the update has written
/// both.
///
/// Whoever writes the values in another way loses the copy, so that it never differs from them.
#[derive(Debug, Clone)]
pub struct ShardWeights {
    values: Tensor<1>,
    in_bf16: Option<Tensor<1>>,
}

impl ShardWeights {
    /// Creates weights from one update's `values` and, where it has rounded them, these rounded.
    #[cfg(feature = "cuda")]
    pub(super) fn updated(values: Tensor<1>, in_bf16: Option<Tensor<1>>) -> Self {
        Self { values, in_bf16 }
    }

    /// The values.
    pub fn values(&self) -> &Tensor<1> {
        &self.values
    }

    /// The values rounded to bf16, where the update has done that.
    pub fn in_bf16(&self) -> Option<&Tensor<1>> {
        self.in_bf16.as_ref()
    }

    /// Returns the values to be written, of which there is no copy any more.
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

    /// A copy of other values than the weights' would be used by products without a word.
    #[test]
    fn a_copy_lasts_until_the_values_are_written() {
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
