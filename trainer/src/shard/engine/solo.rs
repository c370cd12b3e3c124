//! One rank: gathering is sharing, reducing is keeping.

use burn::tensor::Tensor;

use super::Engine;

/// The engine of a run on one rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct Solo;

impl Engine for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn all_gather(&self, shard: &Tensor<1>) -> Tensor<1> {
        shard.clone()
    }

    fn reduce_scatter(&self, full: Tensor<1>) -> Tensor<1> {
        full
    }

    fn all_reduce(&self, _: &mut [f64]) {}
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_conforms() {
        super::super::conformance(&super::Solo);
    }
}
