//! The moving center of DINO's teacher (Caron et al. 2021, equation 4).
//!
//! ```text
//! P = softmax((T - c) / τ)         c ← m · c + (1 - m) · mean_{B,v} T
//! ```

use burn_tensor::Tensor;

use crate::comm::engine::EngineError;
use crate::comm::peers::Peers;
use crate::ops::column_sums;

/// Mean logits over the whole batch and its views, `[K]`, of which `logits` `[B, V, K]` are this rank's.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn batch_mean(logits: &[Tensor<3>], peers: Peers<'_>) -> Result<Tensor<1>, EngineError> {
    let [b, v, _] = logits[0].dims();
    let sums: Vec<Tensor<1>> = logits.iter().map(|logits| column_sums(logits.clone())).collect();
    Ok(peers.sum("center", &sums)? / (b * v * peers.n_micro_batches()) as f64)
}
