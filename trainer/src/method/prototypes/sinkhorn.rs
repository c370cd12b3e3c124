//! Targets that are balanced over prototypes (Sinkhorn and Knopp; Caron et al. 2020; DINOv2).
//!
//! ```text
//! Q = exp((T - max T) / τ)        rows are views of the whole batch, B·V of them, columns prototypes
//! n times:  columns to sum B·V / K, then rows to sum 1
//! ```

use burn_tensor::Tensor;
use kernels::ops::{balanced, exp_rows, largest, scaled, scaled_row_sums};
use ranks::EngineError;

use super::columns::{RowParts, sum, with_column};
use super::exchange::PrototypeExchange;
use super::rows::Rows;
use super::targets::PrototypeTargets;
use crate::method::Collective;

/// Lower bound of the entries of Q, which keeps the sum of a row above zero.
const FLOOR: f32 = 1e-30;

/// Returns the targets of the micro-batches that this rank scores, given their scores.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn targets(
    scores: &Rows,
    temperature: f64,
    n_iterations: usize,
    exchange: PrototypeExchange<'_>,
) -> Result<PrototypeTargets, EngineError> {
    let n_prototypes = scores.n_prototypes() * exchange.n_parts();
    // With the maximum over all rows the largest entry is 1, so that nothing overflows.
    let max = exchange.max("sinkhorn", scores.reduce(1, f32::MIN, largest))?;
    let mut all = scores.map(|scores| exp_rows(scores.clone(), max.clone(), temperature, FLOOR));
    let mut other_mass = None;
    for _ in 0..n_iterations {
        // Avoids a division by zero in a batch without rows.
        let factor = n_prototypes as f64 / scores.n().max(1) as f64;
        let columns = exchange.sum("sinkhorn", &all.column_sums())? * factor;
        let Some(group) = exchange.group() else {
            all = all.map(|q| balanced(q.clone(), columns.clone()));
            continue;
        };
        let row_sums: Vec<Option<Tensor<1>>> =
            all.by_batch().map(|rows| Some(scaled_row_sums(rows?.clone(), columns.clone()))).collect();
        let parts = RowParts::gather("sinkhorn", &row_sums, group)?;
        let sums = parts.combine(sum);
        let shares: Vec<f32> = sums.others.iter().zip(&sums.all).map(|(rest, total)| rest / total).collect();
        other_mass = Some(parts.split_batches(&shares));
        all = all.map_with(&parts.split_batches(&sums.all), |q, totals| {
            let totals = Tensor::from_floats(&totals[..], &q.device());
            scaled(q.clone(), columns.clone(), totals)
        });
    }
    if let Some(other_mass) = &other_mass {
        all = all.map_with(other_mass, |q, other_mass| with_column(q.clone(), other_mass));
    }
    Ok(PrototypeTargets::new(all, other_mass))
}

/// Returns the collectives of [`targets`] over `n_prototypes`.
pub(crate) fn collectives(n_prototypes: usize, n_iterations: usize) -> Vec<Collective> {
    let sums = std::iter::repeat_n(Collective::ColumnSum(n_prototypes), n_iterations);
    std::iter::once(Collective::Number).chain(sums).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_tensor::{Device, Distribution};
    use ranks::communicator::Communicator;
    use ranks::peers::Peers;

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
        let exchange = PrototypeExchange::new(Peers::new(&comm, 1), None);
        let q = targets(&Rows::new(vec![logits], 1), 0.5, 20, exchange).expect("one rank");
        let q = q.rows().batch(0).clone().reshape([64, 8]);
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
        let one = PrototypeExchange::new(Peers::new(&comm, 1), None);
        let four = PrototypeExchange::new(Peers::new(&comm, 4), None);
        let [first, third, fourth] = [0..2, 2..3, 3..7].map(|rows| scores.clone().slice([rows, 0..1, 0..5]));
        let ragged = vec![Some(first), None, Some(third), Some(fourth)];
        let ragged = Rows::from_ragged(ragged, 7, 5, device.clone());
        let parts = targets(&ragged, 0.3, 3, four).expect("one rank");
        let parts = parts.rows();
        assert!(parts.get(1).is_none());
        let parts = Tensor::cat((0..4).filter_map(|i| parts.get(i).cloned()).collect(), 0);
        let expected = targets(&Rows::new(vec![scores.clone()], 1), 0.3, 3, one).expect("one rank");
        let error: f32 = (parts - expected.rows().batch(0).clone()).abs().max().into_scalar();
        assert!(error < 1e-6, "{error}");
        let empty = Rows::from_ragged(vec![None; 4], 0, 5, device);
        assert_eq!(targets(&empty, 0.3, 3, four).expect("one rank").rows().n(), 0);
    }
}
