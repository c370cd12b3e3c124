//! Cross-entropy of scores and targets over prototypes.

use burn_tensor::Tensor;
use kernels::ops::{Pairs, cross_entropy, log_sum_exp};
use ranks::EngineError;
use ranks::column_group::ColumnGroup;

use super::columns::{RowParts, log_sum, to_scores, with_column};
use super::targets::PrototypeTargets;
use crate::method::loss::cross_entropy::{GroupPairs, between_weighted_views};

/// Scores of one micro-batch, `[B, V, K]`; where ranks divide the prototypes, `[B, V, K / C + 1]`,
/// whose last column represents the columns of other ranks.
pub(crate) struct CompletedScores {
    scores: Tensor<3>,
    /// Sums that include the columns of other ranks; `None` where this rank has all columns.
    sums: Option<ColumnSums>,
}

/// Sums of the exponentials of scores over columns, by row.
struct ColumnSums {
    /// Logarithm of the sum over all columns.
    log_total: Vec<f32>,
    /// Logarithm of the sum over the columns of other ranks.
    log_others: Vec<f32>,
    /// Number of parts into which ranks divide the columns.
    n_parts: usize,
}

impl CompletedScores {
    /// Wraps scores of all prototypes.
    pub(crate) fn from_all_columns(scores: Vec<Tensor<3>>) -> Vec<Self> {
        let mut completed = Vec::with_capacity(scores.len());
        for scores in scores {
            completed.push(Self { scores, sums: None });
        }
        completed
    }

    /// Appends the last column to each of `scores`, this rank's columns, with one exchange for all.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn complete(
        scores: Vec<Tensor<3>>,
        temperature: f64,
        group: ColumnGroup<'_>,
    ) -> Result<Vec<Self>, EngineError> {
        let log_sums: Vec<Option<Tensor<1>>> = scores
            .iter()
            .map(|scores| Some(log_sum_exp(scores.clone().inner(), None, temperature)))
            .collect();
        let parts = RowParts::gather("softmax", &log_sums, group)?;
        let combined = parts.combine(log_sum);
        let totals = parts.split_batches(&combined.all);
        let others = parts.split_batches(&combined.others);
        let n_parts = group.n_parts();
        let mut completed = Vec::with_capacity(scores.len());
        for ((scores, log_total), log_others) in scores.into_iter().zip(totals).zip(others) {
            let scores = with_column(scores, &to_scores(&log_others, temperature));
            completed.push(Self { scores, sums: Some(ColumnSums { log_total, log_others, n_parts }) });
        }
        Ok(completed)
    }

    /// Returns the correction that makes this rank's cross-entropy of the completed `row` a share:
    /// ranks split log Σ evenly, and the appended column counts on no rank. `other_mass` is the
    /// target in that column. Assumes a target that sums to one, or whose sum is applied as a
    /// weight.
    ///
    /// ```text
    /// H = Σ t · (log Σ exp(s / τ) - s / τ)
    /// ```
    fn correction(&self, row: usize, other_mass: f32) -> f64 {
        // Targets have a mass in other columns only where ranks divide them, and scores with them.
        let sums = self.sums.as_ref().expect("scores of divided prototypes");
        let share = 1.0 - 1.0 / sums.n_parts as f64;
        f64::from(other_mass) * f64::from(sums.log_others[row]) - share * f64::from(sums.log_total[row])
    }
}

/// Returns the loss of [`between_weighted_views`] for a micro-batch, or this rank's part of it.
/// `index` counts the micro-batches that this rank scores. The parts add up to the loss over ranks.
/// The gradient at this rank's scores is the gradient of the loss.
pub(crate) fn between_views(
    student: &[CompletedScores],
    targets: &PrototypeTargets,
    index: usize,
    temperature: f64,
    other_weight: f64,
) -> Tensor<1> {
    let rows = targets.rows.batch(index);
    let scores: Vec<Tensor<3>> = student.iter().map(|group| group.scores.clone()).collect();
    let loss = between_weighted_views(&scores, rows, temperature, other_weight);
    let Some(other_mass) = &targets.other_mass else { return loss };
    let other_mass = &other_mass[index];
    let [n_images, n_teacher, _] = rows.dims();
    let mut correction = 0.0;
    let mut n_pairs = 0;
    for (i, group) in student.iter().enumerate() {
        let [b, v, _] = group.scores.dims();
        let GroupPairs { pairs, n, weight } = GroupPairs::new(i, v, n_teacher, other_weight);
        n_pairs += n;
        for row in 0..b * v {
            let image = row / v;
            let view = row % v;
            let mut row_correction = 0.0;
            for target in 0..n_teacher {
                if pairs == Pairs::All || target != view {
                    row_correction += group.correction(row, other_mass[image * n_teacher + target]);
                }
            }
            correction += weight * row_correction;
        }
    }
    loss + correction / (n_pairs * n_images) as f64
}

/// Returns the sum of the cross-entropies of the rows of a micro-batch, or this rank's part of it,
/// as in [`between_views`]. `index` counts the micro-batches that this rank scores. The targets
/// have been weighted.
///
/// # Panics
/// If the micro-batch has no rows, or if targets over divided prototypes have not been weighted.
pub(crate) fn weighted_rows(
    student: &CompletedScores,
    targets: &PrototypeTargets,
    index: usize,
    temperature: f64,
) -> Tensor<1> {
    let rows = targets.rows.batch(index).clone();
    let loss = cross_entropy(student.scores.clone(), rows, Pairs::All, temperature);
    let Some(other_mass) = &targets.other_mass else { return loss };
    let correction: f64 = other_mass[index]
        .iter()
        .zip(&targets.weights[index])
        .enumerate()
        .map(|(row, (other_mass, weight))| f64::from(*weight) * student.correction(row, *other_mass))
        .sum();
    loss + correction
}
