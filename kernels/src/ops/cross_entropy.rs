//! Cross-entropy of predicted scores of views against the targets of the views that they are paired
//! with.
//!
//! ```text
//! L = -Σ_b Σ_v Σ_{u paired with v} Σ_k p[b, u, k] · log softmax(s[b, v] / τ)[k]
//! ∂s[b, v] = (W softmax(s[b, v] / τ) - w) / τ      w = Σ_u p[b, u]   W = Σ_k w
//! ```
//!
//! s `[B, V, K]`, p `[B, U, K]`. A view is paired with all targets or, if both networks saw the
//! same views, with the targets of all other views.

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{Tensor, activation};
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cpu::{contiguous, dims, is_flex, owned, slice, slice_mut, tensor};
use super::math::{exp, lane_max, lane_sum, over_rows};
use super::total;

/// The targets that a view is paired with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairs {
    /// All targets.
    All,
    /// All targets except that of the same view.
    Others,
}

/// Returns the sum over all pairs, `[1]`, for `logits` of `[B, V, K]` and `targets` of `[B, U, K]`,
/// which get no gradient.
pub fn cross_entropy(logits: Tensor<3>, targets: Tensor<3>, pairs: Pairs, temperature: f64) -> Tensor<1> {
    if is_flex(&logits) && is_flex(&targets) {
        let kernel = CrossEntropy { pairs, inverse: (1.0 / temperature) as f32 };
        return run(kernel, [logits.into(), targets.into()]);
    }
    #[cfg(feature = "cube")]
    if super::cube::is_cube(&logits) && super::cube::is_cube(&targets) {
        let pairs_same_view = pairs == Pairs::All;
        let kernel = super::cube::CrossEntropy { pairs_same_view, inverse: (1.0 / temperature) as f32 };
        return run(kernel, [logits.into(), targets.into()]);
    }
    plain(logits, targets, pairs, temperature)
}

fn plain(logits: Tensor<3>, targets: Tensor<3>, pairs: Pairs, temperature: f64) -> Tensor<1> {
    let [b, v, k] = logits.dims();
    let [_, u, _] = targets.dims();
    let all = targets.clone().sum_dim(1);
    let wanted = match pairs {
        Pairs::All => all.expand([b, v, k]),
        Pairs::Others => {
            let others = all.clone().expand([b, u, k]) - targets;
            if v > u {
                Tensor::cat(vec![others, all.expand([b, v - u, k])], 1)
            } else {
                others.slice([0..b, 0..v])
            }
        }
    };
    let log_probs = activation::log_softmax(logits / temperature, 2);
    let wanted = if log_probs.is_autodiff() { wanted.autodiff() } else { wanted };
    -total(log_probs * wanted)
}

#[derive(Debug, Clone)]
struct CrossEntropy {
    pairs: Pairs,
    inverse: f32,
}

impl Kernel<Flex, 2> for CrossEntropy {
    /// Logits and targets.
    type Saved = [FlexTensor; 2];

    fn forward(&self, [logits, targets]: [FlexTensor; 2]) -> (FlexTensor, Self::Saved) {
        let [b, v, k]: [usize; 3] = dims(&logits);
        let [_, u, _]: [usize; 3] = dims(&targets);
        let logits = contiguous(&logits);
        let targets = contiguous(&targets);
        let logit_rows = slice(&logits);
        let target_rows = slice(&targets);
        let mut losses = vec![0.0; b * v];
        over_rows(&mut losses, 1, |first, losses| {
            let mut weights = vec![0.0; k];
            for (i, loss) in losses.iter_mut().enumerate() {
                let image = (first + i) / v;
                let view = (first + i) % v;
                self.sum_targets(&target_rows[image * u * k..][..u * k], view, &mut weights);
                *loss = row_loss(&logit_rows[(first + i) * k..][..k], &weights, self.inverse);
            }
        });
        // Row by row in f64, so that the sum does not depend on how rows were split over threads.
        let total: f64 = losses.iter().map(|loss| f64::from(*loss)).sum();
        (tensor(vec![total as f32], [1]), [logits, targets])
    }

    fn backward(
        &self,
        [logits, targets]: Self::Saved,
        grad: FlexTensor,
        wanted: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        let [_, v, k]: [usize; 3] = dims(&logits);
        let [_, u, _]: [usize; 3] = dims(&targets);
        let scale = slice(&contiguous(&grad))[0];
        let targets = slice(&targets);
        let gs = wanted[0].then(|| {
            let mut gs = owned(logits);
            over_rows(slice_mut(&mut gs), k, |first, rows| {
                let mut weights = vec![0.0; k];
                for (i, row) in rows.chunks_exact_mut(k).enumerate() {
                    let image = (first + i) / v;
                    let view = (first + i) % v;
                    self.sum_targets(&targets[image * u * k..][..u * k], view, &mut weights);
                    replace_by_gradient(row, &weights, self.inverse, scale);
                }
            });
            gs
        });
        [gs, None]
    }
}

impl CrossEntropy {
    /// Writes the sum of the targets that `view` is paired with to `out`; `targets` of `[U, K]` are
    /// those of the image.
    fn sum_targets(&self, targets: &[f32], view: usize, out: &mut [f32]) {
        out.fill(0.0);
        for (u, target) in targets.chunks_exact(out.len()).enumerate() {
            if self.pairs == Pairs::All || u != view {
                super::cpu::add(out, target);
            }
        }
    }
}

/// Returns `-Σ w · (s/τ - log Σ exp(s/τ))`.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn row_loss(logits: &[f32], weights: &[f32], inverse: f32) -> f32 {
    let max = lane_max(logits);
    let sum = lane_sum(logits, |s| exp((s - max) * inverse));
    let log_sum = sum.ln();
    let mut totals = [0.0f32; 16];
    for (chunk, weights) in logits.chunks(16).zip(weights.chunks(16)) {
        for ((total, s), w) in totals.iter_mut().zip(chunk).zip(weights) {
            *total += w * (log_sum - (s - max) * inverse);
        }
    }
    totals.iter().sum()
}

/// Replaces a row of logits by its gradient.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn replace_by_gradient(row: &mut [f32], weights: &[f32], inverse: f32, scale: f32) {
    let max = lane_max(row);
    for value in row.iter_mut() {
        *value = exp((*value - max) * inverse);
    }
    let ratio = lane_sum(weights, |w| w) / lane_sum(row, |e| e);
    let scale = scale * inverse;
    for (value, w) in row.iter_mut().zip(weights) {
        *value = (*value * ratio - w) * scale;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, assert_gradients_close, devices, leaves};

    /// Gradients overwrite logits that no other tensor shares, and leave shared logits unchanged.
    #[test]
    fn matches_plain_forward_and_backward() {
        for device in devices() {
            for (v, pairs) in [(2, Pairs::Others), (5, Pairs::Others), (3, Pairs::All)] {
                let logits = leaves(&device, &[[3, v, 37]], 1).remove(0);
                let targets = activation::softmax(leaves(&device, &[[3, 2, 37]], 2).remove(0).inner(), 2);
                let before = logits.clone().inner() * 1.0;
                for is_shared in [true, false] {
                    let input = if is_shared { logits.clone() } else { logits.clone() * 1.0 };
                    let loss = cross_entropy(input, targets.clone(), pairs, 0.1);
                    let grads = (loss.clone() * 0.25).backward();
                    let expected_loss = plain(logits.clone(), targets.clone(), pairs, 0.1);
                    let expected_grads = (expected_loss.clone() * 0.25).backward();
                    assert_close("forward", loss.inner(), expected_loss.inner(), 1e-6);
                    assert_gradients_close("input", &logits, &grads, &expected_grads, 3e-6);
                }
                assert_close("logits", logits.clone().inner(), before, 0.0);
            }
        }
    }
}
