//! Targets that use all prototypes equally (Sinkhorn and Knopp; Caron et al. 2020; DINOv2).
//!
//! ```text
//! Q = exp((T - max T) / τ)        rows are views of the whole batch, B·V of them, columns prototypes
//! n times:  columns to sum B·V / K, then rows to sum 1
//! ```

use kernels::ops::{balanced, column_sums, exp_rows, largest};
use ranks::EngineError;
use ranks::peers::Peers;

use super::rows::Rows;
use crate::method::Collective;

/// Keeps the sum of a row above zero when all its entries vanish.
pub(super) const FLOOR: f32 = 1e-30;

/// Returns the probabilities of this rank's micro-batches, given their scores.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn targets(
    scores: &Rows,
    temperature: f64,
    n_iterations: usize,
    peers: Peers<'_>,
) -> Result<Rows, EngineError> {
    let k = scores.n_prototypes();
    // One maximum for all rows: the largest entry is 1, and nothing overflows.
    let max = peers.max("sinkhorn", scores.reduced(1, f32::MIN, largest))?;
    let mut all = scores.map(|scores| exp_rows(scores.clone(), max.clone(), temperature, FLOOR));
    for _ in 0..n_iterations {
        let columns = all.reduced(k, 0.0, column_sums);
        // Without rows there is nothing to balance.
        let columns = peers.sum("sinkhorn", &columns)? * (k as f64 / scores.n().max(1) as f64);
        all = all.map(|q| balanced(q.clone(), columns.clone()));
    }
    Ok(all)
}

/// Returns the collectives of [`targets`] over `n_prototypes`.
pub(crate) fn collectives(n_prototypes: usize, n_iterations: usize) -> Vec<Collective> {
    let sums = std::iter::repeat_n(Collective::ColumnSum(n_prototypes), n_iterations);
    std::iter::once(Collective::Number).chain(sums).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_tensor::{Device, Distribution, Tensor};
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
        let peers = Peers::new(&comm, 1);
        let q = targets(&Rows::even(vec![logits], peers), 0.5, 20, peers).expect("one rank");
        let q = q.of(0).expect("rows").clone().reshape([64, 8]);
        let columns = q.clone().sum_dim(0).into_data().try_to_vec::<f32>().expect("f32");
        let rows = q.sum_dim(1).into_data().try_to_vec::<f32>().expect("f32");
        assert!(rows.iter().all(|sum| (sum - 1.0).abs() < 1e-5), "{rows:?}");
        assert!(columns.iter().all(|sum| (sum - 8.0).abs() < 0.1), "{columns:?}");
    }

    /// Rows are balanced over the micro-batches that have some, as if they were in one.
    #[test]
    fn micro_batches_may_have_different_numbers_of_rows() {
        let device = Device::flex();
        let comm = Communicator::solo();
        device.seed(3);
        let scores = Tensor::<3>::random([7, 1, 5], Distribution::Normal(0.0, 1.0), &device);
        let part = |rows: std::ops::Range<usize>| Some(scores.clone().slice([rows, 0..1, 0..5]));
        let one = Peers::new(&comm, 1);
        let four = Peers::new(&comm, 4);
        let ragged = vec![part(0..2), None, part(2..3), part(3..7)];
        let ragged = Rows::counted(ragged, 5, device.clone(), four).expect("one rank");
        assert_eq!(ragged.n(), 7);
        let parts = targets(&ragged, 0.3, 3, four).expect("one rank");
        assert!(parts.of(1).is_none());
        let parts = Tensor::cat((0..4).filter_map(|i| parts.of(i).cloned()).collect(), 0);
        let whole = targets(&Rows::even(vec![scores.clone()], one), 0.3, 3, one).expect("one rank");
        let off: f32 = (parts - whole.of(0).expect("rows").clone()).abs().max().into_scalar();
        assert!(off < 1e-6, "{off}");
        let none = Rows::counted(vec![None; 4], 5, device, four).expect("one rank");
        assert_eq!(targets(&none, 0.3, 3, four).expect("one rank").n(), 0);
    }
}
