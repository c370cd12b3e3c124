//! Batch normalization with statistics over the whole batch (Ioffe and Szegedy 2015).
//!
//! ```text
//! n, s, q = rows, Σ (x - μ), Σ (x - μ)²       summed over the batch, by set of statistics; μ the running mean
//! m = s/n      mean = μ + m      var = q/n - (s/n)²      y = γ · (x - μ - m) / √(var + ε) + β
//! μ ← (1 - ρ) μ + ρ mean      σ² ← (1 - ρ) σ² + ρ var · n / (n - 1)       ε = 1e-5, ρ = 0.1, as PyTorch
//! ```
//!
//! The sums of a stage become totals of the next ([`super::unit`]), so that the result depends
//! neither on micro-batches nor on ranks. Without totals, as in evaluation, the running statistics
//! are used.
//!
//! Every network has running statistics of its own, which are not averaged with its weights. Where
//! the mean of a batch is many deviations away from the running mean, as in the first steps, the
//! sums lose precision.

use burn_tensor::Tensor;
use kernels::ops::{self, Affine};

use crate::params::{Init, ParamSpec};
use crate::unit::Context;

/// Number added to the variance, ε, to keep a deviation away from zero.
const EPSILON: f64 = 1e-5;

/// Share of the new statistics in the running ones, ρ.
const MOMENTUM: f64 = 0.1;

/// One normalization of a unit.
#[derive(Debug, Clone)]
pub struct BatchNorm {
    /// Prefix of the parameters: `bn1`.
    pub name: String,
    /// Channels, C.
    pub width: usize,
    /// Initial γ; without one there is neither γ nor β.
    pub gain: Option<f32>,
}

impl BatchNorm {
    /// Creates a normalization whose γ starts at one.
    pub fn new(name: impl Into<String>, width: usize) -> Self {
        Self { name: name.into(), width, gain: Some(1.0) }
    }

    fn param(&self, name: &str) -> String {
        format!("{}.{name}", self.name)
    }

    /// Returns γ, β and the running statistics.
    pub fn params(&self) -> Vec<ParamSpec> {
        let mut params = Vec::new();
        if let Some(gain) = self.gain {
            params.push(ParamSpec { init: Init::Constant(gain), ..self.vector("weight") });
            params.push(self.vector("bias"));
        }
        params.push(ParamSpec::running(self.param("running_mean"), self.width, 0.0));
        params.push(ParamSpec::running(self.param("running_var"), self.width, 1.0));
        params
    }

    fn vector(&self, name: &str) -> ParamSpec {
        ParamSpec::vector(self.param(name), self.width, 0.0)
    }

    /// Returns the number of elements of the sums of a set of statistics.
    pub fn n_sums(&self) -> usize {
        1 + 2 * self.width
    }

    /// Returns `x` of `[.., C]`, to be used in place of the argument, and its sums, `[1 + 2C]`.
    pub fn moments<const D: usize>(&self, x: Tensor<D>, cx: &Context<'_>) -> (Tensor<D>, Tensor<1>) {
        ops::moments(x, cx.leaves.get(&self.param("running_mean")))
    }

    /// Returns the arguments of [`ops::normalize`] for `totals` of `[1 + 2C]`, or without totals
    /// for the running statistics.
    pub fn affine(&self, totals: Option<Tensor<1>>, cx: &Context<'_>) -> Affine {
        let guess = cx.leaves.get::<1>(&self.param("running_mean"));
        let [mean, var] = match totals {
            Some(totals) => {
                let [_, mean, var] = self.statistics(&totals);
                [mean, var]
            }
            None => [guess.zeros_like(), cx.leaves.get(&self.param("running_var"))],
        };
        let factor = (var + EPSILON).sqrt().recip();
        match self.gain {
            Some(_) => Affine {
                guess,
                mean,
                scale: factor * cx.leaves.get(&self.param("weight")),
                shift: cx.leaves.get(&self.param("bias")),
            },
            None => Affine { shift: mean.zeros_like(), guess, mean, scale: factor },
        }
    }

    /// Returns the number of rows, the distance of the mean from the running mean, and the
    /// variance of a set of statistics; rounding cannot make a variance negative.
    fn statistics(&self, totals: &Tensor<1>) -> [Tensor<1>; 3] {
        let c = self.width;
        let n = totals.clone().slice(0..1);
        let mean = totals.clone().slice(1..1 + c) / n.clone();
        let square = totals.clone().slice(1 + c..1 + 2 * c) / n.clone();
        let var = (square - mean.clone() * mean.clone()).clamp_min(0.0);
        [n, mean, var]
    }

    /// Returns the running statistics after a step, by name; the sets of `totals` are applied in
    /// order.
    pub fn observe(
        &self,
        totals: impl IntoIterator<Item = Tensor<1>>,
        cx: &Context<'_>,
    ) -> Vec<(String, Tensor<1>)> {
        let mean_name = self.param("running_mean");
        let var_name = self.param("running_var");
        let guess = cx.leaves.get::<1>(&mean_name);
        let mut var = cx.leaves.get::<1>(&var_name);
        let mut mean = guess.clone();
        for totals in totals {
            let [n, mean_offset, batch_var] = self.statistics(&totals);
            let batch_mean = guess.clone() + mean_offset;
            // The variance of a single row is zero.
            let unbiased = n.clone() / (n - 1.0).clamp_min(1.0);
            mean = mean * (1.0 - MOMENTUM) + batch_mean * MOMENTUM;
            var = var * (1.0 - MOMENTUM) + batch_var * unbiased * MOMENTUM;
        }
        vec![(mean_name, mean), (var_name, var)]
    }
}
