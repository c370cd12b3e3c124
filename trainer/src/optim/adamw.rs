//! AdamW (Loshchilov and Hutter 2019).
//!
//! ```text
//! θ ← θ · (1 - η·λ)                               η the learning rate, λ = 0 without weight decay
//! m ← β₁ m + (1 - β₁) g    v ← β₂ v + (1 - β₂) g²  g after clipping
//! θ ← θ - η / (1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε)
//! ```
//!
//! Biases, gains and other vectors are not decayed by default; position embeddings and class tokens
//! are, as in DINO. A frozen last layer takes no step, but with DINOv2 and DINOv3 its moments
//! follow the gradient meanwhile, as in their code (`ParamSpec::warms_moments`).

use std::ops::Range;

use burn_tensor::Tensor;
use kernels::device::host::{on_host, with_slice};
use multiversion::multiversion;

use super::runs::{by_range, scaled};
use super::state::UnitShard;

/// PyTorch's epsilon; Burn's default is 1e-5.
pub(super) const EPSILON: f32 = 1e-8;

/// AdamW's constants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Decay rates of the two moments.
    pub betas: [f64; 2],
}

/// Constants of one update of a parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Constants {
    /// Factor of weight decay.
    pub(super) shrink: f32,
    /// Factor of clipping, of the gradient.
    pub(super) clip: f32,
    pub(super) beta1: f32,
    pub(super) beta2: f32,
    /// Learning rate over the bias correction of the first moment, η / (1 - β₁ᵗ).
    pub(super) rate: f32,
    /// Bias correction of the root of the second moment, 1 / √(1 - β₂ᵗ).
    pub(super) root: f32,
}

/// Constants of one update of a shard, by ranges of it.
pub(super) type Update = Vec<(Range<usize>, Constants)>;

impl AdamW {
    /// Names of the moments in checkpoints.
    pub const MOMENTS: [&'static str; 2] = ["exp_avg", "exp_avg_sq"];

    /// Returns the constants of update `t` at the learning rate `lr`, with `weight_decay`, for
    /// gradients that are multiplied by `clip`.
    pub(super) fn constants(&self, t: u64, lr: f64, weight_decay: f64, clip: f32) -> Constants {
        let [beta1, beta2] = self.betas;
        let t = t as i32;
        Constants {
            shrink: (1.0 - lr * weight_decay) as f32,
            clip,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            rate: (lr / (1.0 - beta1.powi(t))) as f32,
            root: (1.0 / (1.0 - beta2.powi(t)).sqrt()) as f32,
        }
    }
}

/// Updates a shard in host memory in one pass, given this rank's shard of the mean gradient.
pub(super) fn on_slices(shard: &mut UnitShard, grad: &Tensor<1>, update: Update) {
    let UnitShard { weights, moments, .. } = shard;
    // AdamW::MOMENTS are two.
    let [m, v] = moments.as_mut_slice() else { return };
    with_slice(grad, |grad| {
        on_host(weights.values_mut(), |weights| {
            on_host(&mut m.values, |m| {
                on_host(&mut v.values, |v| {
                    for (range, constants) in update {
                        let weights = &mut weights[range.clone()];
                        let m = &mut m[range.clone()];
                        let v = &mut v[range.clone()];
                        adam(constants, weights, m, v, &grad[range]);
                    }
                });
            });
        });
    });
}

/// Updates a shard by tensor operations, on the device that holds it.
pub(super) fn on_tensors(shard: &mut UnitShard, grad: Tensor<1>, update: &Update) {
    // AdamW::MOMENTS are two.
    let [m, v] = shard.moments.as_mut_slice() else { return };
    // A unit with parameters has a segment; all have the same decay rates.
    let Some(&(_, Constants { beta1, beta2, .. })) = update.first() else { return };
    let grad = scaled(grad, by_range(update, |constants| constants.clip));
    m.values = m.values.clone() * beta1 + grad.clone() * (1.0 - beta1);
    v.values = v.values.clone() * beta2 + grad.clone() * grad * (1.0 - beta2);
    let root = scaled(v.values.clone().sqrt(), by_range(update, |constants| constants.root));
    let direction = m.values.clone() / (root + EPSILON);
    let step = scaled(direction, by_range(update, |constants| constants.rate));
    let shrunk = scaled(shard.weights.values().clone(), by_range(update, |constants| constants.shrink));
    shard.weights = (shrunk - step).into();
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
pub(super) fn adam(c: Constants, param: &mut [f32], m: &mut [f32], v: &mut [f32], grad: &[f32]) {
    for (((param, m), v), grad) in param.iter_mut().zip(m).zip(v).zip(grad) {
        let g = grad * c.clip;
        *m = c.beta1 * *m + (1.0 - c.beta1) * g;
        *v = c.beta2 * *v + (1.0 - c.beta2) * g * g;
        *param = *param * c.shrink - c.rate * *m / (v.sqrt() * c.root + EPSILON);
    }
}
