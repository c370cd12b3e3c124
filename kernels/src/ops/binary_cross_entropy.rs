//! Binary cross-entropy of the scores of views with the targets of their images, each class by
//! itself.
//!
//! ```text
//! L = Σ_b Σ_v Σ_c -t log σ(s) - (1 - t) log σ(-s)
//!   = Σ_b Σ_v Σ_c t max(-s, 0) + (1 - t) max(s, 0) + log(1 + exp(-|s|))
//! ∂s = σ(s) - t                         s = s[b, v, c]   t = t[b, c] in 0..=1
//! ```
//!
//! s `[B, V, C]`, t `[B, 1, C]`. In the second form, no term is a difference of large numbers.

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{Tensor, activation};
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cpu::{contiguous, dims, is_flex, owned, slice, slice_mut, tensor};
use super::math::{exp, over_rows};
use super::{in_f32, total};

/// Returns the sum over views and classes, `[1]`, for `scores` of `[B, V, C]` and `targets` of
/// `[B, 1, C]`, which get no gradient. Scores of fewer bits are converted to f32.
pub fn binary_cross_entropy(scores: Tensor<3>, targets: Tensor<3>) -> Tensor<1> {
    let scores = in_f32(scores);
    if is_flex(&scores) && is_flex(&targets) {
        return run(BinaryCrossEntropy, [scores.into(), targets.into()]);
    }
    plain(scores, targets)
}

fn plain(scores: Tensor<3>, targets: Tensor<3>) -> Tensor<1> {
    let targets = if scores.is_autodiff() { targets.autodiff() } else { targets };
    let absences = targets.clone() * -1.0 + 1.0;
    let present = activation::log_sigmoid(scores.clone()) * targets;
    let absent = activation::log_sigmoid(scores * -1.0) * absences;
    -total(present + absent)
}

#[derive(Debug, Clone)]
struct BinaryCrossEntropy;

impl Kernel<Flex, 2> for BinaryCrossEntropy {
    /// Scores and targets.
    type Saved = [FlexTensor; 2];

    fn forward(&self, [scores, targets]: [FlexTensor; 2]) -> (FlexTensor, Self::Saved) {
        let [b, v, c]: [usize; 3] = dims(&scores);
        let scores = contiguous(&scores);
        let targets = contiguous(&targets);
        let score_rows = slice(&scores);
        let target_rows = slice(&targets);
        let mut losses = vec![0.0; b * v];
        over_rows(&mut losses, 1, |first, losses| {
            for (i, loss) in losses.iter_mut().enumerate() {
                let row = first + i;
                *loss = row_loss(&score_rows[row * c..][..c], &target_rows[row / v * c..][..c]);
            }
        });
        // Row by row in f64, so that the sum does not depend on how rows were split over threads.
        let total: f64 = losses.iter().map(|loss| f64::from(*loss)).sum();
        (tensor(vec![total as f32], [1]), [scores, targets])
    }

    fn backward(
        &self,
        [scores, targets]: Self::Saved,
        grad: FlexTensor,
        wanted: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        let [_, v, c]: [usize; 3] = dims(&scores);
        let scale = slice(&contiguous(&grad))[0];
        let targets = slice(&targets);
        let gs = wanted[0].then(|| {
            let mut gs = owned(scores);
            over_rows(slice_mut(&mut gs), c, |first, rows| {
                for (i, row) in rows.chunks_exact_mut(c).enumerate() {
                    replace_by_gradient(row, &targets[(first + i) / v * c..][..c], scale);
                }
            });
            gs
        });
        [gs, None]
    }
}

/// Returns the loss of the scores of a view.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn row_loss(scores: &[f32], targets: &[f32]) -> f32 {
    let mut totals = [0.0f32; 16];
    for (scores, targets) in scores.chunks(16).zip(targets.chunks(16)) {
        for ((total, score), target) in totals.iter_mut().zip(scores).zip(targets) {
            *total += class_loss(*score, *target);
        }
    }
    totals.iter().sum()
}

/// Returns the loss of the score of one class.
#[inline(always)]
fn class_loss(score: f32, target: f32) -> f32 {
    let linear = target * (-score).max(0.0) + (1.0 - target) * score.max(0.0);
    linear + exp(-score.abs()).ln_1p()
}

/// Replaces the scores of a view by their gradient.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn replace_by_gradient(row: &mut [f32], targets: &[f32], scale: f32) {
    for (value, target) in row.iter_mut().zip(targets) {
        let probability = 1.0 / (1.0 + exp(-*value));
        *value = (probability - target) * scale;
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::{Device, TensorData};

    use super::*;
    use crate::ops::testing::{assert_close, assert_gradients_close, devices, leaves};

    /// Gradients overwrite scores that no other tensor shares, and leave shared scores unchanged.
    #[test]
    fn matches_plain_forward_and_backward() {
        for device in devices() {
            for v in [1, 3] {
                let scores = leaves(&device, &[[4, v, 37]], 1).remove(0);
                let targets = activation::sigmoid(leaves(&device, &[[4, 1, 37]], 2).remove(0).inner());
                let before = scores.clone().inner() * 1.0;
                for is_shared in [true, false] {
                    let input = if is_shared { scores.clone() } else { scores.clone() * 1.0 };
                    let loss = binary_cross_entropy(input, targets.clone());
                    let grads = (loss.clone() * 0.25).backward();
                    let expected_loss = plain(scores.clone(), targets.clone());
                    let expected_grads = (expected_loss.clone() * 0.25).backward();
                    assert_close("forward", loss.inner(), expected_loss.inner(), 2e-6);
                    assert_gradients_close("input", &scores, &grads, &expected_grads, 3e-6);
                }
                assert_close("scores", scores.clone().inner(), before, 0.0);
            }
        }
    }

    /// Scores from zero to where a sigmoid is 0 or 1, with targets that are smoothed and mixed.
    const SCORES: [f32; 6] = [0.0, -3.5, 20.0, -20.0, 0.25, 90.0];
    const TARGETS: [f32; 6] = [1.0, 0.05, 0.95, 0.0, 0.7, 0.5];

    /// Sum and gradient by `torch.nn.functional.binary_cross_entropy_with_logits` in f64.
    const LOSS: f64 = 47.548_837_022_833_72;
    const GRADIENT: [f32; 6] = [-0.5, -0.020_687_77, 0.05, 2.061_153_7e-9, -0.137_823_49, 0.5];

    #[test]
    fn loss_and_gradient_are_those_of_pytorch() {
        for device in devices() {
            let scores = Tensor::<3>::from_data(TensorData::new(SCORES.to_vec(), [1, 2, 3]), &device);
            let first = Tensor::<3>::from_data(TensorData::new(TARGETS[..3].to_vec(), [1, 1, 3]), &device);
            // One view an image, so that each score has a target of its own.
            let second = Tensor::<3>::from_data(TensorData::new(TARGETS[3..].to_vec(), [1, 1, 3]), &device);
            let targets = Tensor::cat(vec![first, second], 0);
            let scores = scores.reshape([2, 1, 3]).autodiff().require_grad();
            let loss = binary_cross_entropy(scores.clone(), targets);
            let value = f64::from(loss.clone().inner().into_scalar::<f32>());
            assert!((value - LOSS).abs() < 1e-6 * LOSS, "{value}");
            let gradient = scores.grad(&loss.backward()).expect("a leaf");
            let expected = Tensor::<3>::from_data(TensorData::new(GRADIENT.to_vec(), [2, 1, 3]), &device);
            assert_close("gradient", gradient, expected, 1e-6);
        }
    }

    /// Returns the loss of one score of one class.
    fn loss_of(score: f32, target: f32) -> f64 {
        let scores = Tensor::<3>::from_data(TensorData::new(vec![score], [1, 1, 1]), &Device::flex());
        let targets = Tensor::<3>::from_data(TensorData::new(vec![target], [1, 1, 1]), &Device::flex());
        f64::from(binary_cross_entropy(scores, targets).into_scalar::<f32>())
    }

    /// A loss of almost nothing does not vanish, and that of a wrong score is its distance from 0.
    #[test]
    fn scores_far_from_zero_have_finite_losses() {
        let expected_losses =
            [(15.0, 1.0, (-15.0f64).exp()), (-1e4, 1.0, 1e4), (1e4, 0.0, 1e4), (1e4, 1.0, 0.0)];
        for (score, target, expected) in expected_losses {
            let loss = loss_of(score, target);
            assert!((loss - expected).abs() <= 1e-5 * expected, "{score} {target}: {loss}");
        }
    }
}
