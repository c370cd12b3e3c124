//! Scores whose columns are divided over ranks: softmax, Sinkhorn and cross-entropy from this rank's columns and a few sums of the others.
//!
//! ```text
//! s = [s_p, e]      e = τ · log Σ exp(s_k / τ) over the columns k of other ranks
//! t = [t_p, o]      o = Σ t_k over the columns k of other ranks
//! softmax(s / τ)    has this rank's probabilities, and their sum over the other ranks in the last column
//! ∂H(t, softmax(s / τ)) / ∂s_p      is that of all columns
//! ```
//!
//! One more column thus stands for all others, and the kernels are those for whole rows. What is exchanged is a number for each row
//! and rank. Sums over parts are taken in the order of parts, on all ranks: they have the same bits.

use burn_tensor::{Tensor, TensorData};
use kernels::ops::{
    Pairs, column_sums, exp_rows, largest, log_sum_exp, row_maxima, scaled, scaled_row_sums, softmax_rows,
};
use ranks::EngineError;
use ranks::column_group::ColumnGroup;
use ranks::peers::Peers;

use super::cross_entropy::{GroupPairs, between_weighted_views};
use super::rows::Rows;
use super::sinkhorn::FLOOR;

/// Targets of a column group.
#[derive(Debug, Clone)]
pub(crate) struct ColumnTargets {
    /// Targets by micro-batch of the group, `[B, V, K / C + 1]`: the last column is the sum over the columns of other ranks.
    pub(crate) rows: Vec<Tensor<3>>,
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
    fn gather(what: &str, own: &[Tensor<1>], group: ColumnGroup<'_>) -> Result<Self, EngineError> {
        let lengths = own.iter().map(|rows| rows.dims()[0]).collect();
        let by_part = group.all_parts(what, Tensor::cat(own.to_vec(), 0))?;
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
        let cut = |n: &usize| {
            start += n;
            rows[start - n..start].to_vec()
        };
        self.lengths.iter().map(cut).collect()
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

/// Returns `softmax((x - center) / temperature)` of this rank's columns `x` by micro-batch of the group; `center` has the same columns.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn softmax(
    scores: &Rows,
    center: Tensor<1>,
    temperature: f64,
    group: ColumnGroup<'_>,
) -> Result<ColumnTargets, EngineError> {
    let own: Vec<Tensor<1>> =
        scores.all().map(|x| log_sum_exp(x.clone(), Some(center.clone()), temperature)).collect();
    let parts = RowParts::gather("softmax", &own, group)?;
    let [total, others] = parts.combined(log_sum);
    let sums: Vec<f32> = others.iter().zip(&total).map(|(other, total)| (other - total).exp()).collect();
    let center = Tensor::cat(vec![center.clone(), Tensor::zeros([1], &center.device())], 0);
    let of_batch = |(x, others): (&Tensor<3>, Vec<f32>)| {
        let last: Vec<f32> = others.iter().map(|other| (f64::from(*other) * temperature) as f32).collect();
        softmax_rows(with_column(x.clone(), &last), Some(center.clone()), temperature)
    };
    let rows = scores.all().zip(parts.by_batch(&others)).map(of_batch).collect();
    Ok(ColumnTargets { rows, others: parts.by_batch(&sums) })
}

/// Returns [`sinkhorn::targets`](super::sinkhorn::targets) of this rank's columns, of `n_prototypes`, by micro-batch of the group.
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
        let own: Vec<Tensor<1>> = all.all().map(|q| scaled_row_sums(q.clone(), sums.clone())).collect();
        let parts = RowParts::gather("sinkhorn", &own, group)?;
        let [total, rest] = parts.combined(sum);
        let share: Vec<f32> = rest.iter().zip(&total).map(|(rest, total)| rest / total).collect();
        others = parts.by_batch(&share);
        let mut totals = parts.by_batch(&total).into_iter();
        all = all.map_in_order(|q| {
            // One list for each micro-batch.
            let totals = totals.next().unwrap_or_default();
            let n = totals.len();
            scaled(q.clone(), sums.clone(), Tensor::from_data(TensorData::new(totals, [n]), &q.device()))
        });
    }
    let rows = all.all().zip(&others).map(|(q, others)| with_column(q.clone(), others)).collect();
    Ok(ColumnTargets { rows, others })
}

/// Returns this rank's part of [`between_weighted_views`] for a micro-batch of the group: groups of student logits `[B, V, K / C]`
/// against `targets` `[B, V_t, K / C + 1]`, of which `others` `[B·V_t]` is the last column. The sum over ranks is the loss; the
/// gradient at this rank's logits is that of the loss.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn between_views(
    student: &[Tensor<3>],
    targets: &Tensor<3>,
    others: &[f32],
    temperature: f64,
    other_weight: f64,
    group: ColumnGroup<'_>,
) -> Result<Tensor<1>, EngineError> {
    let own: Vec<Tensor<1>> =
        student.iter().map(|logits| log_sum_exp(logits.clone().inner(), None, temperature)).collect();
    let parts = RowParts::gather("softmax", &own, group)?;
    let [total, rest] = parts.combined(log_sum);
    let (total, rest) = (parts.by_batch(&total), parts.by_batch(&rest));
    let with_others = |(logits, rest): (&Tensor<3>, &Vec<f32>)| {
        let last: Vec<f32> = rest.iter().map(|rest| (f64::from(*rest) * temperature) as f32).collect();
        with_column(logits.clone(), &last)
    };
    let logits: Vec<Tensor<3>> = student.iter().zip(&rest).map(with_others).collect();
    let loss = between_weighted_views(&logits, targets, temperature, other_weight);
    // H = Σ t · (log Σ exp(s / τ) - s / τ): the last column's own term is not part of it, and the logarithm is shared by all ranks.
    let n_teacher = targets.dims()[1];
    let share = 1.0 - 1.0 / group.n_parts() as f64;
    let (mut correction, mut n_pairs) = (0.0, 0);
    for (i, logits) in student.iter().enumerate() {
        let [b, v, _] = logits.dims();
        let GroupPairs { pairs, n, weight } = GroupPairs::of(i, v, n_teacher, other_weight);
        n_pairs += n;
        for row in 0..b * v {
            let (image, view) = (row / v, row % v);
            let paired = (0..n_teacher).filter(|target| pairs == Pairs::All || *target != view);
            let of_pair = |target: usize| {
                let other = f64::from(others[image * n_teacher + target]);
                other * f64::from(rest[i][row]) - share * f64::from(total[i][row])
            };
            correction += weight * paired.map(of_pair).sum::<f64>();
        }
    }
    let n_images = targets.dims()[0];
    Ok(loss + correction / (n_pairs * n_images) as f64)
}

/// Computes the mean `[K]` over all rows of the batch, `n_rows`, given this rank's columns by micro-batch of the group, `[B, V, K / C]`,
/// or with one more.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn batch_mean(
    what: &str,
    rows: &[Tensor<3>],
    n_columns: usize,
    n_rows: usize,
    group: ColumnGroup<'_>,
) -> Result<Tensor<1>, EngineError> {
    let sums: Vec<Tensor<1>> =
        rows.iter().map(|rows| column_sums(rows.clone()).narrow(0, 0, n_columns)).collect();
    let device = rows[0].device();
    let mean = group.sum(what, &sums)? / n_rows.max(1) as f64;
    let all = group.all_parts(what, mean)?.concat();
    let k = all.len();
    Ok(Tensor::from_data(TensorData::new(all, [k]), &device))
}

/// Returns this rank's shares of the mean entropy in nats and of the mean largest probability of each of the group's micro-batches,
/// `[1]` each: their sums over the group's ranks are [`sharpness`](kernels::ops::sharpness).
///
/// # Errors
/// [`EngineError`].
pub(crate) fn sharpness(
    targets: &ColumnTargets,
    group: ColumnGroup<'_>,
) -> Result<Vec<[Tensor<1>; 2]>, EngineError> {
    let own = |rows: &Tensor<3>| {
        let [_, _, k] = rows.dims();
        rows.clone().narrow(2, 0, k - 1)
    };
    let largest: Vec<Tensor<1>> = targets.rows.iter().map(|rows| row_maxima(own(rows))).collect();
    let parts = RowParts::gather("largest", &largest, group)?;
    let [largest, _] = parts.combined(|values| values.iter().copied().fold(0.0, f64::max));
    let shares = |(rows, largest): (&Tensor<3>, Vec<f32>)| {
        let [entropy, _] = kernels::ops::sharpness(&own(rows));
        let mean = largest.iter().sum::<f32>() / (largest.len() * group.n_parts()) as f32;
        [entropy, Tensor::full([1], mean, &rows.device())]
    };
    Ok(targets.rows.iter().zip(parts.by_batch(&largest)).map(shares).collect())
}
