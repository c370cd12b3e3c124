//! Scores whose columns are divided over ranks: softmax, Sinkhorn and cross-entropy from this
//! rank's columns and sums over the columns of other ranks.
//!
//! ```text
//! s = [s_p, e]      e = τ · log Σ exp(s_k / τ) over the columns k of other ranks
//! t = [t_p, o]      o = Σ t_k over the columns k of other ranks
//! softmax(s / τ)    has this rank's probabilities, and their sum over the other ranks in the last column
//! ∂H(t, softmax(s / τ)) / ∂s_p      is that of all columns
//! ```
//!
//! One additional column thus represents all columns of other ranks, and the kernels for full rows
//! are used. One number per row and rank is exchanged. All ranks sum over parts in the order of
//! parts, so that the sums are bit-identical.

use burn_tensor::{Tensor, TensorData};
use kernels::ops::{
    Pairs, column_sums, cross_entropy, exp_rows, largest, log_sum_exp, row_maxima, scaled, scaled_row_sums,
    softmax_rows,
};
use ranks::EngineError;
use ranks::column_group::ColumnGroup;
use ranks::peers::Peers;

use super::cross_entropy::{GroupPairs, between_weighted_views};
use super::rows::{Rows, summed_entropy};
use super::sinkhorn::FLOOR;

/// Targets of a column group.
#[derive(Debug, Clone)]
pub(crate) struct ColumnTargets {
    /// Targets by micro-batch of the group, `[B, V, K / C + 1]`: the last column is the sum over
    /// the columns of other ranks.
    pub(crate) rows: Rows,
    /// Last column, by micro-batch of the group.
    pub(crate) others: Vec<Vec<f32>>,
}

/// One number per row and part, for the rows of all micro-batches of the group.
struct RowParts {
    /// Numbers of all rows, by part.
    by_part: Vec<Vec<f32>>,
    /// Part of this rank.
    part: usize,
    /// Number of rows of each micro-batch.
    lengths: Vec<usize>,
}

impl RowParts {
    /// Gathers the numbers of all parts. `values` are those of this rank's part, by micro-batch.
    fn gather(what: &str, values: &[Option<Tensor<1>>], group: ColumnGroup<'_>) -> Result<Self, EngineError> {
        let lengths = values.iter().map(|rows| rows.as_ref().map_or(0, |rows| rows.dims()[0])).collect();
        let values: Vec<Tensor<1>> = values.iter().flatten().cloned().collect();
        let by_part = if values.is_empty() {
            // No rank of the group has rows, so that all of them skip the exchange.
            vec![Vec::new(); group.n_parts()]
        } else {
            group.all_parts(what, Tensor::cat(values, 0))?
        };
        Ok(Self { by_part, part: group.part(), lengths })
    }

    /// Returns `f` of the numbers of all parts, and of all parts but this rank's, for each row.
    fn combine(&self, f: impl Fn(&[f64]) -> f64) -> [Vec<f32>; 2] {
        let n = self.by_part[0].len();
        let mut all = Vec::with_capacity(n);
        let mut others = Vec::with_capacity(n);
        for row in 0..n {
            let mut numbers: Vec<f64> = self.by_part.iter().map(|part| f64::from(part[row])).collect();
            all.push(f(&numbers) as f32);
            numbers.remove(self.part);
            others.push(f(&numbers) as f32);
        }
        [all, others]
    }

    /// Splits a list of one number per row into micro-batches.
    fn split_batches(&self, rows: &[f32]) -> Vec<Vec<f32>> {
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
fn log_sum(values: &[f64]) -> f64 {
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    values.iter().map(|value| (value - max).exp()).sum::<f64>().ln() + max
}

/// Returns the sum of all numbers.
fn sum(values: &[f64]) -> f64 {
    values.iter().sum()
}

/// Appends a column to `rows` `[B, V, K]`.
fn with_column(rows: Tensor<3>, column: &[f32]) -> Tensor<3> {
    let [b, v, _] = rows.dims();
    let device = rows.device().inner();
    let column = Tensor::<3>::from_data(TensorData::new(column.to_vec(), [b, v, 1]), &device);
    let column = if rows.is_autodiff() { column.autodiff() } else { column };
    Tensor::cat(vec![rows, column], 2)
}

/// Returns `softmax((x - center) / temperature)` of this rank's columns `x`, by micro-batch of the
/// group. `center` has the same columns.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn softmax(
    scores: &Rows,
    center: Tensor<1>,
    temperature: f64,
    group: ColumnGroup<'_>,
) -> Result<ColumnTargets, EngineError> {
    let log_sums: Vec<Option<Tensor<1>>> = scores
        .by_batch()
        .map(|rows| Some(log_sum_exp(rows?.clone(), Some(center.clone()), temperature)))
        .collect();
    let parts = RowParts::gather("softmax", &log_sums, group)?;
    let [total, others] = parts.combine(log_sum);
    let sums: Vec<f32> = others.iter().zip(&total).map(|(other, total)| (other - total).exp()).collect();
    let center = Tensor::cat(vec![center.clone(), Tensor::zeros([1], &center.device())], 0);
    let rows = scores.map_with(&parts.split_batches(&others), |x, others| {
        softmax_rows(
            with_column(x.clone(), &to_scores(others, temperature)),
            Some(center.clone()),
            temperature,
        )
    });
    Ok(ColumnTargets { rows, others: parts.split_batches(&sums) })
}

/// Returns this rank's columns of [`sinkhorn::targets`](super::sinkhorn::targets) over
/// `n_prototypes`, by micro-batch of the group.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn sinkhorn(
    scores: &Rows,
    n_prototypes: usize,
    temperature: f64,
    n_iterations: usize,
    peers: Peers<'_>,
    group: ColumnGroup<'_>,
) -> Result<ColumnTargets, EngineError> {
    let max = peers.max("sinkhorn", scores.reduce(1, f32::MIN, largest))?;
    let mut all = scores.map(|scores| exp_rows(scores.clone(), max.clone(), temperature, FLOOR));
    let k = scores.n_prototypes();
    let mut others = Vec::new();
    for _ in 0..n_iterations {
        let sums = all.reduce(k, 0.0, column_sums);
        let sums = group.sum("sinkhorn", &sums)? * (n_prototypes as f64 / scores.n().max(1) as f64);
        let row_sums: Vec<Option<Tensor<1>>> =
            all.by_batch().map(|rows| Some(scaled_row_sums(rows?.clone(), sums.clone()))).collect();
        let parts = RowParts::gather("sinkhorn", &row_sums, group)?;
        let [total, rest] = parts.combine(sum);
        let shares: Vec<f32> = rest.iter().zip(&total).map(|(rest, total)| rest / total).collect();
        others = parts.split_batches(&shares);
        all = all.map_with(&parts.split_batches(&total), |q, totals| {
            let totals = Tensor::from_floats(&totals[..], &q.device());
            scaled(q.clone(), sums.clone(), totals)
        });
    }
    let rows = all.map_with(&others, |q, others| with_column(q.clone(), others));
    Ok(ColumnTargets { rows, others })
}

/// Scores of one micro-batch of the group, `[B, V, K / C + 1]`, whose last column represents the
/// columns of other ranks.
pub(crate) struct CompletedScores {
    scores: Tensor<3>,
    /// Logarithm of the sum of the exponentials over all columns, by row.
    total: Vec<f32>,
    /// Logarithm of the sum of the exponentials over the columns of other ranks, by row.
    others: Vec<f32>,
    n_parts: usize,
}

impl CompletedScores {
    /// Appends the last column to each of `scores`, this rank's columns, with one exchange for all.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn complete(
        scores: &[Tensor<3>],
        temperature: f64,
        group: ColumnGroup<'_>,
    ) -> Result<Vec<Self>, EngineError> {
        let log_sums: Vec<Option<Tensor<1>>> = scores
            .iter()
            .map(|scores| Some(log_sum_exp(scores.clone().inner(), None, temperature)))
            .collect();
        let parts = RowParts::gather("softmax", &log_sums, group)?;
        let [total, others] = parts.combine(log_sum).map(|rows| parts.split_batches(&rows));
        let n_parts = group.n_parts();
        let mut completed = Vec::with_capacity(scores.len());
        for ((scores, total), others) in scores.iter().zip(total).zip(others) {
            let scores = with_column(scores.clone(), &to_scores(&others, temperature));
            completed.push(Self { scores, total, others, n_parts });
        }
        Ok(completed)
    }

    /// Returns the difference between this rank's part of the cross-entropy of `row` and the
    /// cross-entropy of the completed row, for a target with `other` in the last column. The part
    /// does not include the term of the last column, and ranks share the logarithm equally.
    ///
    /// ```text
    /// H = Σ t · (log Σ exp(s / τ) - s / τ)
    /// ```
    fn correction(&self, row: usize, other: f32) -> f64 {
        let share = 1.0 - 1.0 / self.n_parts as f64;
        f64::from(other) * f64::from(self.others[row]) - share * f64::from(self.total[row])
    }
}

/// Returns this rank's part of [`between_weighted_views`] for micro-batch `number` of the group.
/// The parts add up to the loss over ranks; the gradient at this rank's scores is that of the loss.
pub(crate) fn between_views(
    student: &[CompletedScores],
    targets: &ColumnTargets,
    number: usize,
    temperature: f64,
    other_weight: f64,
) -> Tensor<1> {
    let rows = targets.rows.batch(number);
    let others = &targets.others[number];
    let scores: Vec<Tensor<3>> = student.iter().map(|student| student.scores.clone()).collect();
    let loss = between_weighted_views(&scores, rows, temperature, other_weight);
    let [n_images, n_teacher, _] = rows.dims();
    let mut correction = 0.0;
    let mut n_pairs = 0;
    for (i, student) in student.iter().enumerate() {
        let [b, v, _] = student.scores.dims();
        let GroupPairs { pairs, n, weight } = GroupPairs::new(i, v, n_teacher, other_weight);
        n_pairs += n;
        for row in 0..b * v {
            let image = row / v;
            let view = row % v;
            let mut row_correction = 0.0;
            for target in 0..n_teacher {
                if pairs == Pairs::All || target != view {
                    row_correction += student.correction(row, others[image * n_teacher + target]);
                }
            }
            correction += weight * row_correction;
        }
    }
    loss + correction / (n_pairs * n_images) as f64
}

/// Returns this rank's part of the sum of the cross-entropies of the rows of micro-batch `number`
/// of the group, whose targets have been multiplied by `weights`, as in [`between_views`].
///
/// # Panics
/// If the micro-batch has no rows.
pub(crate) fn weighted_rows(
    student: &CompletedScores,
    targets: &ColumnTargets,
    number: usize,
    weights: &[f32],
    temperature: f64,
) -> Tensor<1> {
    let correction: f64 = targets.others[number]
        .iter()
        .zip(weights)
        .enumerate()
        .map(|(row, (other, weight))| f64::from(*weight) * student.correction(row, *other))
        .sum();
    let rows = targets.rows.batch(number).clone();
    cross_entropy(student.scores.clone(), rows, Pairs::All, temperature) + correction
}

/// Computes the means of each kind of rows over the global batch, `[K]` each, with one sum over
/// ranks, given this rank's columns by micro-batch of the group, `[B, V, K / C]` or with one more
/// column. All kinds have the same number of rows.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn batch_means<const N: usize>(
    what: &str,
    rows: [&Rows; N],
    group: ColumnGroup<'_>,
) -> Result<[Tensor<1>; N], EngineError> {
    let k = rows[0].n_prototypes();
    let n = rows[0].n().max(1);
    let device = rows[0].device();
    let sums = rows.map(|rows| rows.reduce(k, 0.0, |rows| column_sums(rows).narrow(0, 0, k)));
    let mut joined: Vec<Tensor<1>> = Vec::with_capacity(sums[0].len());
    for t in 0..sums[0].len() {
        joined.push(Tensor::cat(sums.iter().map(|sums| sums[t].clone()).collect(), 0));
    }
    let parts = group.all_parts(what, group.sum(what, &joined)? / n as f64)?;
    Ok(std::array::from_fn(|i| {
        let all: Vec<f32> = parts.iter().flat_map(|part| &part[i * k..(i + 1) * k]).copied().collect();
        Tensor::from_floats(&all[..], device)
    }))
}

/// Returns this rank's shares of the mean entropy in nats and of the mean largest probability of
/// each of the group's micro-batches, `[1]` each. All micro-batches have rows. The sums over the
/// group's ranks are [`sharpness`](kernels::ops::sharpness).
///
/// # Errors
/// [`EngineError`].
pub(crate) fn sharpness(
    targets: &ColumnTargets,
    group: ColumnGroup<'_>,
) -> Result<Vec<[Tensor<1>; 2]>, EngineError> {
    let maxima: Vec<Option<Tensor<1>>> =
        targets.rows.by_batch().map(|rows| Some(row_maxima(drop_last_column(rows?)))).collect();
    let parts = RowParts::gather("largest", &maxima, group)?;
    let [maxima, _] = parts.combine(|values| values.iter().copied().fold(0.0, f64::max));
    let mut shares = Vec::new();
    for (rows, maxima) in targets.rows.by_batch().flatten().zip(parts.split_batches(&maxima)) {
        let [entropy, _] = kernels::ops::sharpness(&drop_last_column(rows));
        let mean = maxima.iter().sum::<f32>() / (maxima.len() * group.n_parts()) as f32;
        shares.push([entropy, Tensor::full([1], mean, &rows.device())]);
    }
    Ok(shares)
}

/// Returns this rank's share of the mean entropy in nats of all rows of the global batch, `[1]`.
/// The shares add up to the mean over the group's ranks.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn mean_entropy(
    targets: &ColumnTargets,
    group: ColumnGroup<'_>,
) -> Result<Tensor<1>, EngineError> {
    let sums = targets.rows.reduce(1, 0.0, |rows| summed_entropy(drop_last_column(&rows)));
    let n = targets.rows.n().max(1);
    Ok(group.sum("entropy", &sums)? / n as f64)
}

/// Returns targets `[B, V, K / C + 1]` without the column of other ranks.
fn drop_last_column(rows: &Tensor<3>) -> Tensor<3> {
    let [_, _, k] = rows.dims();
    rows.clone().narrow(2, 0, k - 1)
}

/// Converts logarithms of exponentials at `temperature` into scores.
fn to_scores(logarithms: &[f32], temperature: f64) -> Vec<f32> {
    logarithms.iter().map(|logarithm| (f64::from(*logarithm) * temperature) as f32).collect()
}
