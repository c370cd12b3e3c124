//! Targets over prototypes, and their statistics.

use burn_tensor::Tensor;
use kernels::ops::{log_sum_exp, row_maxima, sharpness, softmax_rows};
use ranks::EngineError;

use super::columns::{RowParts, log_sum, to_scores, with_column};
use super::exchange::PrototypeExchange;
use super::rows::Rows;

/// Targets of the micro-batches that a rank scores.
#[derive(Debug, Clone)]
pub(crate) struct PrototypeTargets {
    /// Targets, `[B, V, K]`; where ranks divide the prototypes, `[B, V, K / C + 1]`, whose last
    /// column is the sum over the columns of other ranks.
    pub(super) rows: Rows,
    /// Sum of each target over the columns of other ranks, before rows were weighted, by
    /// micro-batch; `None` where every rank has all columns.
    pub(super) other_mass: Option<Vec<Vec<f32>>>,
    /// Weights by which rows were multiplied, by micro-batch; empty if they were not.
    pub(super) weights: Vec<Vec<f32>>,
}

impl PrototypeTargets {
    /// Wraps targets that have not been weighted.
    pub(super) fn new(rows: Rows, other_mass: Option<Vec<Vec<f32>>>) -> Self {
        Self { rows, other_mass, weights: Vec::new() }
    }

    /// Returns `softmax((scores - center) / temperature)`, where `center` is that of all
    /// prototypes.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn softmax(
        scores: &Rows,
        center: Tensor<1>,
        temperature: f64,
        exchange: PrototypeExchange<'_>,
    ) -> Result<Self, EngineError> {
        let center = exchange.own_columns(center);
        let Some(group) = exchange.group() else {
            let rows = scores.map(|scores| softmax_rows(scores.clone(), Some(center.clone()), temperature));
            return Ok(Self::new(rows, None));
        };
        let log_sums: Vec<Option<Tensor<1>>> = scores
            .by_batch()
            .map(|rows| Some(log_sum_exp(rows?.clone(), Some(center.clone()), temperature)))
            .collect();
        let parts = RowParts::gather("softmax", &log_sums, group)?;
        let logs = parts.combine(log_sum);
        let other_mass: Vec<f32> =
            logs.others.iter().zip(&logs.all).map(|(other, total)| (other - total).exp()).collect();
        let center = Tensor::cat(vec![center.clone(), Tensor::zeros([1], &center.device())], 0);
        let rows = scores.map_with(&parts.split_batches(&logs.others), |x, log_others| {
            softmax_rows(
                with_column(x.clone(), &to_scores(log_others, temperature)),
                Some(center.clone()),
                temperature,
            )
        });
        Ok(Self::new(rows, Some(parts.split_batches(&other_mass))))
    }

    /// Joins targets of single views, `[B', 1, K]`, of which the first `n_images` rows of each
    /// micro-batch are those of its images, to `[B, V, K]`. The batch has `n_micro_batches`.
    pub(crate) fn join_views(by_view: &[Self], n_images: usize, n_micro_batches: usize) -> Self {
        let first = &by_view[0].rows;
        let mut batches = Vec::new();
        let mut other_mass = Vec::new();
        for index in 0..first.by_batch().count() {
            let views =
                by_view.iter().map(|view| view.rows.batch(index).clone().slice(0..n_images)).collect();
            batches.push(Some(Tensor::cat(views, 1)));
            let mut column = Vec::new();
            for image in 0..n_images {
                for sums in by_view.iter().filter_map(|view| view.other_mass.as_ref()) {
                    column.push(sums[index][image]);
                }
            }
            other_mass.push(column);
        }
        let n = n_images * by_view.len() * n_micro_batches;
        let rows = Rows::from_ragged(batches, n, first.n_prototypes(), first.device().clone());
        Self::new(rows, by_view[0].is_divided().then_some(other_mass))
    }

    /// Returns whether ranks divide the prototypes.
    pub(crate) fn is_divided(&self) -> bool {
        self.other_mass.is_some()
    }

    /// Targets of the columns that this rank scores.
    pub(crate) fn rows(&self) -> &Rows {
        &self.rows
    }

    /// Multiplies row `r` of micro-batch `b` by `weights[b][r]`.
    pub(crate) fn weighted(self, weights: Vec<Vec<f32>>) -> Self {
        Self { rows: self.rows.weighted(&weights), other_mass: self.other_mass, weights }
    }

    /// Returns the mean entropy in nats and the mean largest probability of each micro-batch that
    /// this rank scores, `[1]` each, or this rank's shares of them, whose sums are [`sharpness`].
    /// All micro-batches have rows.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn sharpness(
        &self,
        exchange: PrototypeExchange<'_>,
    ) -> Result<Vec<[Tensor<1>; 2]>, EngineError> {
        let Some(group) = exchange.group() else {
            return Ok(self.rows.by_batch().flatten().map(sharpness).collect());
        };
        let maxima: Vec<Option<Tensor<1>>> =
            self.rows.by_batch().map(|rows| Some(row_maxima(self.own_columns(rows?)))).collect();
        let parts = RowParts::gather("largest", &maxima, group)?;
        let maxima = parts.combine(|values| values.iter().copied().fold(0.0, f64::max)).all;
        let mut shares = Vec::new();
        for (rows, maxima) in self.rows.by_batch().flatten().zip(parts.split_batches(&maxima)) {
            let [entropy, _] = sharpness(&self.own_columns(rows));
            let mean = maxima.iter().sum::<f32>() / (maxima.len() * group.n_parts()) as f32;
            shares.push([entropy, Tensor::full([1], mean, &rows.device())]);
        }
        Ok(shares)
    }

    /// Returns the mean entropy in nats of all rows of the global batch, `[1]`, or this rank's
    /// share of it.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn mean_entropy(&self, exchange: PrototypeExchange<'_>) -> Result<Tensor<1>, EngineError> {
        let sums = self.rows.reduce(1, 0.0, |rows| summed_entropy(self.own_columns(&rows)));
        let n = self.rows.n().max(1);
        Ok(exchange.sum("entropy", &sums)? / n as f64)
    }

    /// Returns `rows` without the column of other ranks, if there is one.
    fn own_columns(&self, rows: &Tensor<3>) -> Tensor<3> {
        if self.is_divided() { rows.clone().narrow(2, 0, self.rows.n_prototypes()) } else { rows.clone() }
    }
}

/// Returns the sum of the entropies in nats of the rows of `targets`, `[1]`.
fn summed_entropy(targets: Tensor<3>) -> Tensor<1> {
    let [b, v, _] = targets.dims();
    let [mean, _] = sharpness(&targets);
    mean * (b * v) as f64
}
