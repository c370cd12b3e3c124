//! Contrast with the keys of another network (MoCo v3: Chen, Xie and He 2021, algorithm 1).
//!
//! ```text
//! loss = 2τ · mean_i [ log Σ_j exp(q_i · k_j / τ) - q_i · k_i / τ ]
//! q [b, D] queries of a micro-batch, k [B, D] keys of the whole batch without a graph, both of length one
//! ```

use burn_tensor::{Tensor, TensorData};
use kernels::ops::matmul;
use ranks::EngineError;
use ranks::peers::Peers;

use crate::method::Collective;

/// Keys of one view of the global batch.
pub(crate) struct Keys {
    /// Keys by position in the batch, `[B, D]`.
    all: Tensor<2>,
    temperature: f64,
}

/// Returns the collective of [`Keys::new`] for keys of `d` channels.
pub(crate) fn collective(d: usize) -> Collective {
    Collective::Gather(d)
}

impl Keys {
    /// Gathers the keys of the global batch from this rank's `keys`, `[b, D]` by micro-batch, of
    /// length one.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn new(keys: &[Tensor<2>], temperature: f64, peers: Peers<'_>) -> Result<Self, EngineError> {
        Ok(Self { all: peers.gather("keys", keys)?, temperature })
    }

    /// Returns the loss of `queries` `[b, D]`, of length one and with a graph, whose images are at
    /// `positions` of the global batch, `[1]`.
    pub(crate) fn loss(&self, queries: Tensor<2>, positions: &[usize]) -> Tensor<1> {
        let [b, _] = queries.dims();
        let [n, _] = self.all.dims();
        let scores = matmul(queries, (self.all.clone().transpose() / self.temperature).autodiff());
        let mut one_hot = vec![0.0f32; b * n];
        for (row, position) in positions.iter().enumerate() {
            one_hot[row * n + position] = 1.0;
        }
        let one_hot: Tensor<2> = Tensor::from_data(TensorData::new(one_hot, [b, n]), &self.all.device());
        let matched = (scores.clone() * one_hot.autodiff()).sum_dim(1);
        // The largest score is treated as a constant by the gradient.
        let largest = scores.clone().inner().max_dim(1).autodiff();
        let logs = (scores - largest.clone()).exp().sum_dim(1).log() + largest;
        (logs - matched).mean() * (2.0 * self.temperature)
    }
}
