//! Numbers of rows from the ranks that compute different columns of them, and the column that
//! represents those of other ranks.

use burn_tensor::{Tensor, TensorData};
use ranks::EngineError;
use ranks::column_group::ColumnGroup;

/// One number per row and part, for the rows of all micro-batches of the group.
pub(super) struct RowParts {
    /// Numbers of all rows, by part.
    by_part: Vec<Vec<f32>>,
    /// Part of this rank.
    part: usize,
    /// Number of rows of each micro-batch.
    lengths: Vec<usize>,
}

/// Results of a function of the numbers of each row's parts, by row.
pub(super) struct Combined {
    /// Of the numbers of all parts.
    pub(super) all: Vec<f32>,
    /// Of those of all parts but this rank's.
    pub(super) others: Vec<f32>,
}

impl RowParts {
    /// Gathers the numbers of all parts. `values` are those of this rank's part, by micro-batch.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(super) fn gather(
        subject: &str,
        values: &[Option<Tensor<1>>],
        group: ColumnGroup<'_>,
    ) -> Result<Self, EngineError> {
        let lengths = values.iter().map(|rows| rows.as_ref().map_or(0, |rows| rows.dims()[0])).collect();
        let values: Vec<Tensor<1>> = values.iter().flatten().cloned().collect();
        let by_part = if values.is_empty() {
            // No rank of the group has rows, so that all of them skip the exchange.
            vec![Vec::new(); group.n_parts()]
        } else {
            group.all_parts(subject, Tensor::cat(values, 0))?
        };
        Ok(Self { by_part, part: group.part(), lengths })
    }

    /// Returns `f` of the numbers of all parts, and of all parts but this rank's, for each row.
    pub(super) fn combine(&self, f: impl Fn(&[f64]) -> f64) -> Combined {
        let n = self.by_part[0].len();
        let mut all = Vec::with_capacity(n);
        let mut others = Vec::with_capacity(n);
        for row in 0..n {
            let mut numbers: Vec<f64> = self.by_part.iter().map(|part| f64::from(part[row])).collect();
            all.push(f(&numbers) as f32);
            numbers.remove(self.part);
            others.push(f(&numbers) as f32);
        }
        Combined { all, others }
    }

    /// Splits a list of one number per row into micro-batches.
    pub(super) fn split_batches(&self, rows: &[f32]) -> Vec<Vec<f32>> {
        let mut batches = Vec::with_capacity(self.lengths.len());
        let mut rest = rows;
        for n in &self.lengths {
            let (batch, tail) = rest.split_at(*n);
            batches.push(batch.to_vec());
            rest = tail;
        }
        batches
    }
}

/// Returns the logarithm of the sum of the exponentials.
pub(super) fn log_sum(values: &[f64]) -> f64 {
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    values.iter().map(|value| (value - max).exp()).sum::<f64>().ln() + max
}

/// Returns the sum of all numbers.
pub(super) fn sum(values: &[f64]) -> f64 {
    values.iter().sum()
}

/// Appends a column to `rows` `[B, V, K]`.
pub(super) fn with_column(rows: Tensor<3>, column: &[f32]) -> Tensor<3> {
    let [b, v, _] = rows.dims();
    let device = rows.device().inner();
    let column = Tensor::<3>::from_data(TensorData::new(column.to_vec(), [b, v, 1]), &device);
    let column = if rows.is_autodiff() { column.autodiff() } else { column };
    Tensor::cat(vec![rows, column], 2)
}

/// Converts logarithms of exponentials at `temperature` into scores.
pub(super) fn to_scores(logarithms: &[f32], temperature: f64) -> Vec<f32> {
    logarithms.iter().map(|logarithm| (f64::from(*logarithm) * temperature) as f32).collect()
}
