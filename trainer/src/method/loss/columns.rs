//! Scores whose columns are divided over ranks: softmax, Sinkhorn and cross-entropy from this
//! rank's columns and a few sums of the others.
//!
//! ```text
//! s = [s_p, e]      e = τ · log Σ exp(s_k / τ) over the columns k of other ranks
//! t = [t_p, o]      o = Σ t_k over the columns k of other ranks
//! softmax(s / τ)    has this rank's probabilities, and their sum over the other ranks in the last column
//! ∂H(t, softmax(s / τ)) / ∂s_p      is that of all columns
//! ```
//!
//! One more column thus stands for all others, and the kernels are those for whole rows. What is
//! exchanged is a number for each row and rank. Sums over parts are taken in the order of parts, on
//! all ranks: they have the same bits.

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

/// Numbers of rows: `[C]` lists of one for each row of all micro-batches of the group.
struct RowParts {
    by_part: Vec<Vec<f32>>,
    part: usize,
    /// Rows of each micro-batch.
    lengths: Vec<usize>,
}

impl RowParts {
    /// Gathers the numbers of all parts; `own` are those of this rank's, by micro-batch.
    fn gather(what: &str, own: &[Option<Tensor<1>>], group: ColumnGroup<'_>) -> Result<Self, EngineError> {
        let lengths = own.iter().map(|rows| rows.as_ref().map_or(0, |rows| rows.dims()[0])).collect();
        let own: Vec<Tensor<1>> = own.iter().flatten().cloned().collect();
        let by_part = match own.is_empty() {
            // All ranks of the group see that there are no rows.
            true => vec![Vec::new(); group.n_parts()],
            false => group.all_parts(what, Tensor::cat(own, 0))?,
        };
        Ok(Self { by_part, part: group.part(), lengths })
    }

    /// Returns `f` of the numbers of a row, of all parts and of all but this rank's.
    fn combined(&self, f: impl Fn(&[f64]) -> f64) -> [Vec<f32>; 2] {
        let n = self.by_part[0].len();
        let of_row = |row: usize, without: Option<usize>| {
            let parts = self.by_part.iter().enumerate().filter(|(part, _)| Some(*part) != without);
            let numbers: Vec<f64> = parts.map(|(_, numbers)| f64::from(numbers[row])).collect();
            f(&numbers) as f32
        };
        [None, Some(self.part)].map(|without| (0..n).map(|row| of_row(row, without)).collect())
    }

    /// Cuts a number for each row into micro-batches.
    fn by_batch(&self, rows: &[f32]) -> Vec<Vec<f32>> {
        let mut start = 0;
        self.lengths
            .iter()
            .map(|n| {
                start += n;
                rows[start - n..start].to_vec()
            })
            .collect()
    }
}

/// Logarithm of the sum of the exponentials.
fn log_sum(values: &[f64]) -> f64 {
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    values.iter().map(|value| (value - max).exp()).sum::<f64>().ln() + max
}

/// Sum of all numbers.
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

/// Returns `softmax((x - center) / temperature)` of this rank's columns `x` by micro-batch of the
/// group; `center` has the same columns.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn softmax(
    scores: &Rows,
    center: Tensor<1>,
    temperature: f64,
    group: ColumnGroup<'_>,
) -> Result<ColumnTargets, EngineError> {
    let log_sums = |x: &Tensor<3>| log_sum_exp(x.clone(), Some(center.clone()), temperature);
    let own: Vec<Option<Tensor<1>>> = scores.by_batch().map(|rows| rows.map(log_sums)).collect();
    let parts = RowParts::gather("softmax", &own, group)?;
    let [total, others] = parts.combined(log_sum);
    let sums: Vec<f32> = others.iter().zip(&total).map(|(other, total)| (other - total).exp()).collect();
    let center = Tensor::cat(vec![center.clone(), Tensor::zeros([1], &center.device())], 0);
    let rows = scores.map_with(&parts.by_batch(&others), |x, others| {
        softmax_rows(
            with_column(x.clone(), &as_scores(others, temperature)),
            Some(center.clone()),
            temperature,
        )
    });
    Ok(ColumnTargets { rows, others: parts.by_batch(&sums) })
}

/// Returns [`sinkhorn::targets`](super::sinkhorn::targets) of this rank's columns, of
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
    let max = peers.max("sinkhorn", scores.reduced(1, f32::MIN, largest))?;
    let mut all = scores.map(|scores| exp_rows(scores.clone(), max.clone(), temperature, FLOOR));
    let k = scores.n_prototypes();
    let mut others = Vec::new();
    for _ in 0..n_iterations {
        let sums = all.reduced(k, 0.0, column_sums);
        let sums = group.sum("sinkhorn", &sums)? * (n_prototypes as f64 / scores.n().max(1) as f64);
        let row_sums = |q: &Tensor<3>| scaled_row_sums(q.clone(), sums.clone());
        let own: Vec<Option<Tensor<1>>> = all.by_batch().map(|rows| rows.map(row_sums)).collect();
        let parts = RowParts::gather("sinkhorn", &own, group)?;
        let [total, rest] = parts.combined(sum);
        let share: Vec<f32> = rest.iter().zip(&total).map(|(rest, total)| rest / total).collect();
        others = parts.by_batch(&share);
        all = all.map_with(&parts.by_batch(&total), |q, totals| {
            let totals = Tensor::from_floats(&totals[..], &q.device());
            scaled(q.clone(), sums.clone(), totals)
        });
    }
    let rows = all.map_with(&others, |q, others| with_column(q.clone(), others));
    Ok(ColumnTargets { rows, others })
}

/// Scores of one micro-batch of the group, `[B, V, K / C + 1]`, of which the last column stands for
/// those of other ranks.
pub(crate) struct CompletedScores {
    scores: Tensor<3>,
    /// Logarithm of the sum of the exponentials over all columns, by row.
    total: Vec<f32>,
    /// Logarithm of the sum of the exponentials over the columns of other ranks, by row.
    others: Vec<f32>,
    n_parts: usize,
}

impl CompletedScores {
    /// Completes `scores`, this rank's columns, with one exchange for all of them.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn of(
        scores: &[Tensor<3>],
        temperature: f64,
        group: ColumnGroup<'_>,
    ) -> Result<Vec<Self>, EngineError> {
        let own: Vec<Option<Tensor<1>>> = scores
            .iter()
            .map(|scores| Some(log_sum_exp(scores.clone().inner(), None, temperature)))
            .collect();
        let parts = RowParts::gather("softmax", &own, group)?;
        let [total, others] = parts.combined(log_sum).map(|rows| parts.by_batch(&rows));
        Ok(scores
            .iter()
            .zip(total.into_iter().zip(others))
            .map(|(scores, (total, others))| Self {
                scores: with_column(scores.clone(), &as_scores(&others, temperature)),
                total,
                others,
                n_parts: group.n_parts(),
            })
            .collect())
    }

    /// Returns what is added to the cross-entropy of `row` with a target that has `other` in the
    /// last column, to make it this rank's part: the last column's own term is not part of it, and
    /// ranks share the logarithm.
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
/// The sum over ranks is the loss; the gradient at this rank's scores is that of the loss.
pub(crate) fn between_views(
    student: &[CompletedScores],
    targets: &ColumnTargets,
    number: usize,
    temperature: f64,
    other_weight: f64,
) -> Tensor<1> {
    let rows = targets.rows.even_of(number);
    let others = &targets.others[number];
    let scores: Vec<Tensor<3>> = student.iter().map(|student| student.scores.clone()).collect();
    let loss = between_weighted_views(&scores, rows, temperature, other_weight);
    let [n_images, n_teacher, _] = rows.dims();
    let mut correction = 0.0;
    let mut n_pairs = 0;
    for (i, student) in student.iter().enumerate() {
        let [b, v, _] = student.scores.dims();
        let GroupPairs { pairs, n, weight } = GroupPairs::of(i, v, n_teacher, other_weight);
        n_pairs += n;
        for row in 0..b * v {
            let image = row / v;
            let view = row % v;
            let paired = (0..n_teacher).filter(|target| pairs == Pairs::All || *target != view);
            correction += weight
                * paired
                    .map(|target: usize| student.correction(row, others[image * n_teacher + target]))
                    .sum::<f64>();
        }
    }
    loss + correction / (n_pairs * n_images) as f64
}

/// Returns this rank's part of the sum of the cross-entropies of the rows of micro-batch `number`
/// of the group, whose targets have been multiplied by `weights`: see [`between_views`].
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
    let rows = targets.rows.even_of(number).clone();
    cross_entropy(student.scores.clone(), rows, Pairs::All, temperature) + correction
}

/// Computes means over all rows of the batch, `[K]` each, given this rank's columns by micro-batch
/// of the group, `[B, V, K / C]`, or with one more. One sum over ranks serves all of them; all have
/// the same number of rows.
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
    let sums = rows.map(|rows| rows.reduced(k, 0.0, |rows| column_sums(rows).narrow(0, 0, k)));
    let joined = |t: usize| Tensor::cat(sums.iter().map(|sums| sums[t].clone()).collect(), 0);
    let joined: Vec<Tensor<1>> = (0..sums[0].len()).map(joined).collect();
    let parts = group.all_parts(what, group.sum(what, &joined)? / n as f64)?;
    Ok(std::array::from_fn(|i| {
        let all: Vec<f32> = parts.iter().flat_map(|part| &part[i * k..(i + 1) * k]).copied().collect();
        Tensor::from_floats(&all[..], device)
    }))
}

/// Returns this rank's shares of the mean entropy in nats and of the mean largest probability of
/// each of the group's micro-batches, `[1]` each, all of which have rows: their sums over the
/// group's ranks are [`sharpness`](kernels::ops::sharpness).
///
/// # Errors
/// [`EngineError`].
pub(crate) fn sharpness(
    targets: &ColumnTargets,
    group: ColumnGroup<'_>,
) -> Result<Vec<[Tensor<1>; 2]>, EngineError> {
    let largest: Vec<Option<Tensor<1>>> =
        targets.rows.by_batch().map(|rows| rows.map(|rows| row_maxima(own_columns(rows)))).collect();
    let parts = RowParts::gather("largest", &largest, group)?;
    let [largest, _] = parts.combined(|values| values.iter().copied().fold(0.0, f64::max));
    Ok(targets
        .rows
        .by_batch()
        .flatten()
        .zip(parts.by_batch(&largest))
        .map(|(rows, largest)| {
            let [entropy, _] = kernels::ops::sharpness(&own_columns(rows));
            let mean = largest.iter().sum::<f32>() / (largest.len() * group.n_parts()) as f32;
            [entropy, Tensor::full([1], mean, &rows.device())]
        })
        .collect())
}

/// Returns this rank's share of the mean entropy of all rows of the batch in nats, `[1]`: the sum
/// over the group's ranks is that mean.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn mean_entropy(
    targets: &ColumnTargets,
    group: ColumnGroup<'_>,
) -> Result<Tensor<1>, EngineError> {
    let summed = |rows: Tensor<3>| summed_entropy(own_columns(&rows));
    let n = targets.rows.n().max(1);
    Ok(group.sum("entropy", &targets.rows.reduced(1, 0.0, summed))? / n as f64)
}

/// Returns targets `[B, V, K / C + 1]` without the column of other ranks.
fn own_columns(rows: &Tensor<3>) -> Tensor<3> {
    let [_, _, k] = rows.dims();
    rows.clone().narrow(2, 0, k - 1)
}

/// Returns the scores whose exponentials have these logarithms at `temperature`.
fn as_scores(logarithms: &[f32], temperature: f64) -> Vec<f32> {
    logarithms.iter().map(|logarithm| (f64::from(*logarithm) * temperature) as f32).collect()
}
