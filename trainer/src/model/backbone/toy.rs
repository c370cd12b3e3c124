//! A backbone for tests: cells of pixels, a batch normalization over the whole batch, and a projection.
//!
//! ```text
//! h = W₁ · cells + b₁                              [B, N, 3p²] → [B, N, D]
//! n, s, q = count, Σ(h - μ), Σ(h - μ)²             over the batch, by set of statistics; μ the running mean
//! ĥ = (h - mean) / √(var + ε)                      mean = μ + s/n   var = q/n - (s/n)²
//! y = W₂ · gelu(γ ĥ + β) + b₂
//! ```

use burn_tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::{BackboneConfig, Readout};
use crate::model::features::Features;
use crate::model::params::{Init, ParamSpec};
use crate::model::unit::{Context, Cost, GroupShape, StageOutput, Unit};
use crate::ops::{gelu, linear};

const EPSILON: f64 = 1e-5;

/// Share of the new statistics in the running ones.
const MOMENTUM: f64 = 0.1;

/// The toy, as a recipe writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Channels.
    pub width: usize,
}

impl BackboneConfig for Config {
    fn validate(&self) -> Result<(), String> {
        if self.width == 0 { Err("model.width must be at least 1".into()) } else { Ok(()) }
    }

    fn units(&self, _: Readout) -> Vec<Box<dyn Unit>> {
        vec![
            Box::new(Affine { name: "stem", input: 3 * 4 * 4, width: self.width }),
            Box::new(BatchNorm { width: self.width }),
            Box::new(Affine { name: "project", input: self.width, width: self.width }),
        ]
    }

    fn width(&self) -> usize {
        self.width
    }

    fn cell_px(&self) -> usize {
        4
    }

    fn stride_px(&self) -> usize {
        4
    }

    fn image_px(&self) -> usize {
        16
    }

    fn examples() -> Vec<Self> {
        vec![Self { width: 6 }]
    }
}

struct Affine {
    name: &'static str,
    input: usize,
    width: usize,
}

impl Unit for Affine {
    fn name(&self) -> &str {
        self.name
    }

    fn params(&self) -> Vec<ParamSpec> {
        let weight = ParamSpec::weight("weight", [self.width, self.input], Init::Uniform(0.4));
        vec![weight, ParamSpec::vector("bias", self.width, 0.1)]
    }

    fn forward(&self, _: usize, groups: Vec<Features>, cx: &Context<'_>) -> StageOutput {
        let map = |group: &Features| {
            let x = linear(cx.rounded(group.x.clone()), cx.weight("weight"), cx.weight("bias"));
            group.with(x)
        };
        groups.iter().map(map).collect::<Vec<_>>().into()
    }

    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let rows: usize = groups.iter().map(GroupShape::n_rows).sum();
        let flops = 2.0 * (rows * self.input * self.width) as f64;
        let outputs = groups.iter().map(|group| GroupShape { width: self.width, ..*group }).collect();
        (Cost { flops, graph: (rows * self.width) as f64 }, outputs)
    }
}

struct BatchNorm {
    width: usize,
}

impl BatchNorm {
    /// Mean and variance, `[D]`, from totals `[1 + 2D]`.
    fn moments(&self, totals: &Tensor<1>, running: Tensor<1>) -> [Tensor<1>; 2] {
        let d = self.width;
        let n = totals.clone().slice(0..1);
        let shift = totals.clone().slice(1..1 + d) / n.clone();
        let square = totals.clone().slice(1 + d..1 + 2 * d) / n;
        [shift.clone() + running, square - shift.clone() * shift]
    }
}

impl Unit for BatchNorm {
    fn name(&self) -> &str {
        "norm"
    }

    fn params(&self) -> Vec<ParamSpec> {
        let d = self.width;
        vec![
            ParamSpec::vector("weight", d, 1.2),
            ParamSpec::vector("bias", d, 0.3),
            ParamSpec::running("running_mean", d, 0.0),
            ParamSpec::running("running_var", d, 1.0),
        ]
    }

    fn n_stages(&self) -> usize {
        2
    }

    fn forward(&self, stage: usize, groups: Vec<Features>, cx: &Context<'_>) -> StageOutput {
        let d = self.width;
        let running = cx.leaves.get::<1>("running_mean");
        if stage == 0 {
            let n_sets = cx.sets.0.iter().max().map_or(0, |last| last + 1);
            let mut sums: Vec<Option<Tensor<1>>> = vec![None; n_sets];
            for (group, set) in groups.iter().zip(&cx.sets.0) {
                let [b, n, _] = group.x.dims();
                let h = group.x.clone().reshape([b * n, d]) - running.clone().unsqueeze();
                let count = Tensor::<1>::full([1], (b * n) as f32, &h.device());
                let columns = |h: Tensor<2>| h.sum_dim(0).reshape([d]);
                let own = Tensor::cat(vec![count, columns(h.clone()), columns(h.clone() * h)], 0);
                sums[*set] = Some(match sums[*set].take() {
                    Some(sum) => sum + own,
                    None => own,
                });
            }
            return StageOutput { features: groups, sums: sums.into_iter().flatten().collect() };
        }
        let norm = |(group, set): (&Features, &usize)| {
            let [mean, var] = match cx.totals.get(*set) {
                Some(totals) => self.moments(totals, running.clone()),
                None => [running.clone(), cx.leaves.get("running_var")],
            };
            let x = (group.x.clone() - mean.unsqueeze()) / (var + EPSILON).sqrt().unsqueeze();
            group.with(gelu(
                x * cx.leaves.get::<1>("weight").unsqueeze() + cx.leaves.get::<1>("bias").unsqueeze(),
            ))
        };
        groups.iter().zip(&cx.sets.0).map(norm).collect::<Vec<_>>().into()
    }

    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let rows: usize = groups.iter().map(GroupShape::n_rows).sum();
        (Cost { flops: 0.0, graph: (4 * rows * self.width) as f64 }, groups.to_vec())
    }

    fn observe(&self, totals: &[Vec<Tensor<1>>], cx: &Context<'_>) -> Vec<(String, Tensor<1>)> {
        let running = |name: &str| cx.leaves.get::<1>(name);
        let [mut mean, mut var] = [running("running_mean"), running("running_var")];
        for totals in totals.iter().flatten() {
            let [batch_mean, batch_var] = self.moments(totals, running("running_mean"));
            mean = mean * (1.0 - MOMENTUM) + batch_mean * MOMENTUM;
            var = var * (1.0 - MOMENTUM) + batch_var * MOMENTUM;
        }
        vec![("running_mean".into(), mean), ("running_var".into(), var)]
    }
}
