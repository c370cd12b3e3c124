//! Targets that are balanced over prototypes (Sinkhorn and Knopp; Caron et al. 2020; DINOv2).
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

/// Lower bound of the entries of Q, which keeps the sum of a row above zero.
pub(super) const FLOOR: f32 = 1e-30;

/// Returns the targets of this rank's micro-batches, given their scores.
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
    // With the maximum over all rows the largest entry is 1, so that nothing overflows.
    let max = peers.max("sinkhorn", scores.reduce(1, f32::MIN, largest))?;
    let mut all = scores.map(|scores| exp_rows(scores.clone(), max.clone(), temperature, FLOOR));
    for _ in 0..n_iterations {
        let columns = all.reduce(k, 0.0, column_sums);
        // Avoids a division by zero in a batch without rows.
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
    fn rows_sum_to_one_and_columns_are_balanced() {
        let device = Device::flex();
        device.seed(2);
        let logits = Tensor::<3>::random([32, 2, 8], Distribution::Normal(0.0, 1.0), &device);
        // All rows prefer the first prototype: a softmax would assign nearly all of them to it.
        let bias = Tensor::<1>::from_floats([3.0, 0., 0., 0., 0., 0., 0., 0.], &device);
        let comm = Communicator::solo();
        let logits = logits + bias.unsqueeze();
        let peers = Peers::new(&comm, 1);
        let q = targets(&Rows::new(vec![logits], peers), 0.5, 20, peers).expect("one rank");
        let q = q.batch(0).clone().reshape([64, 8]);
        let columns = q.clone().sum_dim(0).into_data().try_to_vec::<f32>().expect("f32");
        let rows = q.sum_dim(1).into_data().try_to_vec::<f32>().expect("f32");
        assert!(rows.iter().all(|sum| (sum - 1.0).abs() < 1e-5), "{rows:?}");
        assert!(columns.iter().all(|sum| (sum - 8.0).abs() < 0.1), "{columns:?}");
    }

    /// Targets of micro-batches with different numbers of rows, or none, equal those of one
    /// micro-batch with all rows.
    #[test]
    fn micro_batches_may_have_different_numbers_of_rows() {
        let device = Device::flex();
        let comm = Communicator::solo();
        device.seed(3);
        let scores = Tensor::<3>::random([7, 1, 5], Distribution::Normal(0.0, 1.0), &device);
        let one = Peers::new(&comm, 1);
        let four = Peers::new(&comm, 4);
        let [first, third, fourth] = [0..2, 2..3, 3..7].map(|rows| scores.clone().slice([rows, 0..1, 0..5]));
        let ragged = vec![Some(first), None, Some(third), Some(fourth)];
        let ragged = Rows::from_ragged_counted(ragged, 5, device.clone(), four).expect("one rank");
        assert_eq!(ragged.n(), 7);
        let parts = targets(&ragged, 0.3, 3, four).expect("one rank");
        assert!(parts.get(1).is_none());
        let parts = Tensor::cat((0..4).filter_map(|i| parts.get(i).cloned()).collect(), 0);
        let expected = targets(&Rows::new(vec![scores.clone()], one), 0.3, 3, one).expect("one rank");
        let error: f32 = (parts - expected.batch(0).clone()).abs().max().into_scalar();
        assert!(error < 1e-6, "{error}");
        let empty = Rows::from_ragged_counted(vec![None; 4], 5, device, four).expect("one rank");
        assert_eq!(targets(&empty, 0.3, 3, four).expect("one rank").n(), 0);
    }
}
