//! Stochastic gradient descent with momentum, as in PyTorch, and layer-wise adaptive rates (LARS
//! and LARC: You et al. 2017).
//!
//! ```text
//! d = q · (c g + λ θ)        c the factor of clipping, λ = 0 where a parameter is not decayed
//! b ← μ b + d
//! θ ← θ - η b                or θ - η (d + μ b) with Nesterov's momentum
//!
//! q = 1, or with layer-wise rates
//!     lars   q = t |θ| / |c g + λ θ|
//!     larc   q = t |θ| / (|g| + λ |θ| + ε)     ε = 1e-8
//! q = 1 where a norm is zero
//! ```
//!
//! `lars` is that of VISSL and MoCo v3: biases, gains and other parameters that are not decayed
//! keep q = 1. `larc` is that of NVIDIA's apex without clipping: it adapts every parameter, and a
//! parameter with a zero norm is not decayed.

use std::ops::Range;

use burn_tensor::Tensor;
use kernels::device::host::{on_host, with_slice};
use multiversion::multiversion;

use super::runs::{by_range, scaled};
use super::state::UnitShard;

/// Keeps a rate finite.
const EPSILON: f64 = 1e-8;

/// Constants of stochastic gradient descent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// Momentum, μ: factor of the previous direction.
    pub momentum: f64,
    /// Whether the momentum is Nesterov's.
    pub nesterov: bool,
    /// Layer-wise adaptive rates, if any.
    pub adaptation: Option<Adaptation>,
}

/// Layer-wise adaptive rates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adaptation {
    /// Trust coefficient, t: norm of a layer's update over that of the layer, at a rate of one.
    pub trust: f64,
    /// Rule for the rate of a layer.
    pub rule: RateRule,
}

/// Rule for the rate of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RateRule {
    /// Rate from the norm of the direction, for parameters with weight decay.
    Lars,
    /// Rate from the norms of gradient and weight decay, for every parameter.
    Larc,
}

/// Norms of a parameter, over all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ParamNorms {
    /// Norm of the parameter, |θ|.
    pub(super) param: f64,
    /// Norm of the gradient, |g|.
    pub(super) grad: f64,
    /// Norm of the direction, |g + λ θ|, for LARS; unused otherwise.
    pub(super) direction: f64,
}

/// Constants of one update of a parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Constants {
    /// Factor of the gradient.
    scale: f32,
    /// Factor of the parameter in the direction.
    pull: f32,
    rate: f32,
    momentum: f32,
    nesterov: bool,
}

/// Constants of one update of a shard, by ranges of it.
pub(super) type Update = Vec<(Range<usize>, Constants)>;

/// Factors of the direction of a parameter.
#[derive(Debug, Clone, Copy)]
struct Adapted {
    /// Factor of the whole direction, q.
    q: f64,
    /// Weight decay, λ; zero for a parameter that LARC does not decay.
    decay: f64,
}

impl Sgd {
    /// Names of the moments in checkpoints.
    pub const MOMENTS: [&'static str; 1] = ["momentum_buffer"];

    /// Returns constants that do not change a parameter: running statistics have no gradient.
    pub(super) fn identity_constants(&self) -> Constants {
        let momentum = self.momentum as f32;
        Constants { scale: 0.0, pull: 0.0, rate: 0.0, momentum, nesterov: self.nesterov }
    }

    /// Returns the constants of an update at the learning rate `lr` of a parameter with the weight
    /// decay `decay`, if any, for gradients that are multiplied by `clip`.
    pub(super) fn constants(
        &self,
        lr: f64,
        decay: Option<f64>,
        clip: f32,
        norms: Option<ParamNorms>,
    ) -> Constants {
        let decay_rate = decay.unwrap_or(0.0);
        let mut adapted = Adapted { q: 1.0, decay: decay_rate };
        if let Some(adaptation) = self.adaptation
            && let Some(norms) = norms
            && adaptation.applies_to(decay)
        {
            adapted = adaptation.adapt(norms, decay_rate);
        }
        Constants {
            scale: adapted.q as f32 * clip,
            pull: (adapted.q * adapted.decay) as f32,
            rate: lr as f32,
            momentum: self.momentum as f32,
            nesterov: self.nesterov,
        }
    }
}

impl Adaptation {
    /// Returns whether the rate of a parameter with weight decay `decay`, if any, is adapted.
    fn applies_to(self, decay: Option<f64>) -> bool {
        self.rule == RateRule::Larc || decay.is_some()
    }

    /// Returns the factors of a parameter with the weight decay `decay`.
    fn adapt(self, norms: ParamNorms, decay: f64) -> Adapted {
        let ParamNorms { param, grad, direction } = norms;
        match self.rule {
            RateRule::Lars if param > 0.0 && direction > 0.0 => {
                Adapted { q: self.trust * param / direction, decay }
            }
            RateRule::Lars => Adapted { q: 1.0, decay },
            RateRule::Larc if param > 0.0 && grad > 0.0 => {
                Adapted { q: self.trust * param / (grad + decay * param + EPSILON), decay }
            }
            // apex does not decay it either.
            RateRule::Larc => Adapted { q: 1.0, decay: 0.0 },
        }
    }
}

/// Updates a shard in host memory in one pass, given this rank's shard of the mean gradient.
pub(super) fn on_slices(shard: &mut UnitShard, grad: &Tensor<1>, update: Update) {
    let UnitShard { weights, moments, .. } = shard;
    // Sgd::MOMENTS is one.
    let [direction] = moments.as_mut_slice() else { return };
    with_slice(grad, |grad| {
        on_host(weights.values_mut(), |weights| {
            on_host(&mut direction.values, |direction| {
                for (range, constants) in update {
                    let weights = &mut weights[range.clone()];
                    let direction = &mut direction[range.clone()];
                    descend(constants, weights, direction, &grad[range]);
                }
            });
        });
    });
}

/// Updates a shard by tensor operations, on the device that holds it.
pub(super) fn on_tensors(shard: &mut UnitShard, grad: Tensor<1>, update: &Update) {
    // Sgd::MOMENTS is one.
    let [direction] = shard.moments.as_mut_slice() else { return };
    // A unit with parameters has a segment; all have the same momentum.
    let Some(&(_, Constants { momentum, nesterov, .. })) = update.first() else { return };
    let decay = scaled(shard.weights.values().clone(), by_range(update, |constants| constants.pull));
    let d = scaled(grad, by_range(update, |constants| constants.scale)) + decay;
    direction.values = direction.values.clone() * momentum + d.clone();
    let step = if nesterov { d + direction.values.clone() * momentum } else { direction.values.clone() };
    let step = scaled(step, by_range(update, |constants| constants.rate));
    shard.weights = (shard.weights.values().clone() - step).into();
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn descend(c: Constants, param: &mut [f32], direction: &mut [f32], grad: &[f32]) {
    for ((param, b), grad) in param.iter_mut().zip(direction).zip(grad) {
        let d = c.scale * grad + c.pull * *param;
        *b = c.momentum * *b + d;
        let step = if c.nesterov { d + c.momentum * *b } else { *b };
        *param -= c.rate * step;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapted_sgd(rule: RateRule) -> Sgd {
        Sgd { momentum: 0.9, nesterov: false, adaptation: Some(Adaptation { trust: 0.02, rule }) }
    }

    fn norms(param: f64, grad: f64, direction: f64) -> Option<ParamNorms> {
        Some(ParamNorms { param, grad, direction })
    }

    fn assert_close(a: f32, b: f64) {
        assert!((f64::from(a) - b).abs() < 1e-7, "{a} {b}");
    }

    /// Factors computed by hand, from the formulas.
    #[test]
    fn layer_wise_rates_match_the_formulas() {
        let lars = adapted_sgd(RateRule::Lars);
        let larc = adapted_sgd(RateRule::Larc);
        for (sgd, norm) in [(lars, 0.8), (larc, 0.7 + 0.3)] {
            let decayed = sgd.constants(0.5, Some(0.1), 1.0, norms(3.0, 0.7, 0.8));
            assert_close(decayed.scale, 0.02 * 3.0 / norm);
            assert_close(decayed.pull, 0.02 * 3.0 / norm * 0.1);
            assert_close(decayed.rate, 0.5);
        }
        // A bias.
        assert_close(lars.constants(0.5, None, 1.0, norms(3.0, 0.5, 0.5)).scale, 1.0);
        assert_close(larc.constants(0.5, None, 1.0, norms(3.0, 0.5, 0.5)).scale, 0.12);
        // The rate is not adapted where a norm is zero.
        for (param, grad) in [(0.0, 1.0), (1.0, 0.0)] {
            let constants = larc.constants(0.5, Some(0.1), 1.0, norms(param, grad, 0.1));
            assert_eq!([constants.scale, constants.pull], [1.0, 0.0]);
            let constants = lars.constants(0.5, Some(0.1), 1.0, norms(param, grad, param * grad));
            assert_eq!([constants.scale, constants.pull], [1.0, 0.1]);
        }
    }
}
