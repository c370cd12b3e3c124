//! Targets that use all prototypes equally (Sinkhorn and Knopp; Caron et al. 2020; DINOv2).
//!
//! ```text
//! Q = exp((T - max T) / τ)        rows are views of the whole batch, B·V of them, columns prototypes
//! n times:  columns to sum B·V / K, then rows to sum 1
//! ```

use burn_tensor::Tensor;
use kernels::ops::{balanced, column_sums, exp_rows, largest};
use ranks::EngineError;
use ranks::peers::Peers;

/// Keeps the sum of a row above zero when all its entries vanish.
const FLOOR: f32 = 1e-30;

/// Returns the probabilities of this rank's micro-batches, `[B, V, K]` each, given their `logits`; `n_rows` counts the rows of
/// all ranks. Micro-batches may have different numbers of rows.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn targets(
    logits: &[Tensor<3>],
    n_rows: usize,
    temperature: f64,
    n_iterations: usize,
    peers: Peers<'_>,
) -> Result<Vec<Tensor<3>>, EngineError> {
    let [_, _, k] = logits[0].dims();
    // One maximum for all rows: the largest entry is 1, and nothing overflows.
    let max = peers.max("sinkhorn", logits.iter().map(|logits| largest(logits.clone())).collect())?;
    let start = |logits: &Tensor<3>| exp_rows(logits.clone(), max.clone(), temperature, FLOOR);
    let mut all: Vec<Tensor<3>> = logits.iter().map(start).collect();
    for _ in 0..n_iterations {
        let columns: Vec<Tensor<1>> = all.iter().map(|q| column_sums(q.clone())).collect();
        let columns = peers.sum("sinkhorn", &columns)? * (k as f64 / n_rows as f64);
        all = all.into_iter().map(|q| balanced(q, columns.clone())).collect();
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_tensor::{Device, Distribution};
    use ranks::communicator::Communicator;

    /// Rows sum to one exactly, and columns nearly to their equal share.
    #[test]
    fn sinkhorn_balances_the_prototypes() {
        let device = Device::flex();
        device.seed(2);
        let logits = Tensor::<3>::random([32, 2, 8], Distribution::Normal(0.0, 1.0), &device);
        // One prototype that everybody prefers: a softmax would give it nearly all.
        let bias = Tensor::<1>::from_floats([3.0, 0., 0., 0., 0., 0., 0., 0.], &device);
        let comm = Communicator::solo();
        let logits = logits + bias.unsqueeze();
        let q = targets(&[logits], 64, 0.5, 20, Peers::new(&comm, 1)).expect("one rank");
        let q = q[0].clone().reshape([64, 8]);
        let columns = q.clone().sum_dim(0).into_data().try_to_vec::<f32>().expect("f32");
        let rows = q.sum_dim(1).into_data().try_to_vec::<f32>().expect("f32");
        assert!(rows.iter().all(|sum| (sum - 1.0).abs() < 1e-5), "{rows:?}");
        assert!(columns.iter().all(|sum| (sum - 8.0).abs() < 0.1), "{columns:?}");
    }
}
