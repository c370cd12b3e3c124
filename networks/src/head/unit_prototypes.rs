//! Scores against prototypes of length one (SwAV: Caron et al. 2020).
//!
//! ```text
//! scores = (z / |z|) · Cᵀ      before every step C ← C / |C| by rows       [M, D] → [M, K]
//! ```
//!
//! The gradient ignores the normalization: before each step, prototypes are projected back onto
//! the sphere.

use burn_tensor::Tensor;
use kernels::ops::{NORM_EPSILON, matmul_transposed, unit_rows};

use crate::leaves::Leaves;
use crate::params::{Init, ParamSpec};
use crate::tokens::Tokens;
use crate::unit::{Context, Cost, Elements, GroupShape, StageOutput, Unit};

/// Name of the parameter of the prototypes.
const WEIGHT: &str = "weight";

/// A layer of prototypes.
#[derive(Debug, Clone)]
pub struct UnitPrototypes {
    /// Name of the unit.
    pub name: String,
    /// Input channels.
    pub input: usize,
    /// Number of prototypes, K.
    pub count: usize,
    /// Steps at the beginning of a run during which prototypes are not updated.
    pub frozen_steps: u64,
}

impl Unit for UnitPrototypes {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<ParamSpec> {
        let init = Init::Uniform(1.0 / (self.input as f32).sqrt());
        let weight = ParamSpec::weight(WEIGHT, [self.count, self.input], init);
        vec![ParamSpec { frozen_steps: self.frozen_steps, is_constrained: true, ..weight }]
    }

    fn forward(&self, _: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        let prototypes = cx.leaves.get::<2>(WEIGHT);
        let mut outputs = Vec::with_capacity(streams.len());
        for tokens in &streams {
            let z = unit_rows(tokens.x.clone(), NORM_EPSILON);
            outputs.push(tokens.with(matmul_transposed(z, prototypes.clone())));
        }
        outputs.into()
    }

    fn constrain(&self, leaves: &Leaves<'_>) -> Vec<(String, Tensor<1>)> {
        let unit = unit_rows(leaves.get::<2>(WEIGHT), NORM_EPSILON);
        vec![(WEIGHT.into(), unit.reshape([self.count * self.input]))]
    }

    fn column_part(&self, n_parts: usize) -> Option<Box<dyn Unit>> {
        if !self.count.is_multiple_of(n_parts) {
            return None;
        }
        Some(Box::new(Self { count: self.count / n_parts, ..self.clone() }))
    }

    /// Counts a graph that holds scores, their softmax and their targets.
    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let rows: usize = groups.iter().map(GroupShape::n_rows).sum();
        let flops = 2.0 * (rows * self.count * self.input) as f64;
        let cost = Cost::new(flops, Elements::wide(3.0 * (rows * self.count) as f64));
        (cost, groups.iter().map(|group| GroupShape { width: self.count, ..*group }).collect())
    }
}
