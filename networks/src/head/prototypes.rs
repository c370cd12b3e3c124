//! Scores against prototypes (DINO: Caron et al. 2021, appendix C).
//!
//! ```text
//! logits = (z / |z|) · (g ⊙ V / |V|)ᵀ      rows of V are prototypes, [M, D] → [M, K]
//! ```
//!
//! The layer is weight-normalized. Its gain g is either fixed at one, so that only the directions
//! of V matter, or trained with the rest. DINOv3 uses V without normalization.

use burn_tensor::Tensor;
use kernels::ops::{NORM_EPSILON, matmul_transposed, unit_rows, weight_norm_linear};

use crate::params::{Init, ParamSpec};
use crate::tokens::Tokens;
use crate::unit::{Context, Cost, Elements, GroupShape, StageOutput, Unit};

/// A layer of prototypes.
#[derive(Debug, Clone)]
pub struct Prototypes {
    /// Name of the unit.
    pub name: String,
    /// Input channels.
    pub input: usize,
    /// Number of prototypes, K.
    pub count: usize,
    /// Lengths of the prototypes.
    pub lengths: Lengths,
    /// Steps at the beginning of a run during which the layer is not updated.
    pub frozen_steps: u64,
    /// Whether the optimizer's moments follow the layer's gradients while it is frozen: DINOv2.
    pub warms_moments: bool,
}

/// Lengths of prototypes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lengths {
    /// One: only directions matter.
    One,
    /// Gains that are trained, and decayed like a weight.
    Gain,
    /// Lengths of the rows of the matrix, which is not normalized.
    Free,
}

/// Standard deviation of the initial rows of a matrix that is not normalized.
const FREE_STD: f32 = 0.02;

impl Prototypes {
    /// Returns the scores of the unit vectors `z` of `[M, D]`, `[M, K]`.
    fn scores(&self, z: Tensor<2>, cx: &Context<'_>) -> Tensor<2> {
        if self.lengths == Lengths::Free {
            return matmul_transposed(z, cx.leaves.get::<2>("weight"));
        }
        let directions = cx.leaves.get::<2>("weight_v");
        let gain = match self.lengths {
            Lengths::Gain => cx.leaves.get::<2>("weight_g").reshape([self.count]),
            _ => Tensor::<1>::ones([self.count], &directions.device().inner()).cast(directions.dtype()),
        };
        weight_norm_linear(z, directions, gain)
    }
}

impl Unit for Prototypes {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<ParamSpec> {
        let shape = [self.count, self.input];
        let params = match self.lengths {
            Lengths::Free => vec![ParamSpec::weight("weight", shape, Init::TruncNormal(FREE_STD))],
            Lengths::One | Lengths::Gain => {
                let init = Init::Uniform(1.0 / (self.input as f32).sqrt());
                let mut params = vec![ParamSpec::weight("weight_v", shape, init)];
                if self.lengths == Lengths::Gain {
                    params.push(ParamSpec::weight("weight_g", [self.count, 1], Init::Constant(1.0)));
                }
                params
            }
        };
        params
            .into_iter()
            .map(|param| ParamSpec {
                frozen_steps: self.frozen_steps,
                warms_moments: self.warms_moments,
                ..param
            })
            .collect()
    }

    fn forward(&self, _: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        let mut outputs = Vec::with_capacity(streams.len());
        for tokens in &streams {
            let z = unit_rows(tokens.x.clone(), NORM_EPSILON);
            outputs.push(tokens.with(self.scores(z, cx)));
        }
        outputs.into()
    }

    fn column_part(&self, n_parts: usize) -> Option<Box<dyn Unit>> {
        if !self.count.is_multiple_of(n_parts) {
            return None;
        }
        Some(Box::new(Self { count: self.count / n_parts, ..self.clone() }))
    }

    /// Counts a graph that holds logits, their softmax and their targets. Weight normalization
    /// computes the gradients of directions and lengths from the scores.
    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let rows: usize = groups.iter().map(GroupShape::n_rows).sum();
        let flops = 2.0 * (rows * self.count * self.input) as f64;
        let graph = Elements::wide(3.0 * (rows * self.count) as f64);
        let cost = Cost { holds_output: self.lengths != Lengths::Free, ..Cost::new(flops, graph) };
        (cost, groups.iter().map(|group| GroupShape { width: self.count, ..*group }).collect())
    }
}
