//! A linear layer: the head of a classifier.
//!
//! ```text
//! logits = W x + b          [M, D] → [M, C]
//! ```

use kernels::ops::linear;

use crate::params::{Init, ParamSpec};
use crate::tokens::Tokens;
use crate::unit::{Context, Cost, Elements, GroupShape, StageOutput, Unit};

/// A linear layer.
pub struct Linear {
    /// Name of the unit.
    pub name: String,
    /// Input channels.
    pub input: usize,
    /// Output channels.
    pub output: usize,
    /// Standard deviation of the initial weights; biases start at 0.
    pub init_std: f32,
}

impl Unit for Linear {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<ParamSpec> {
        let init = Init::TruncNormal(self.init_std);
        vec![
            ParamSpec::weight("weight", [self.output, self.input], init),
            ParamSpec::vector("bias", self.output, 0.0),
        ]
    }

    fn forward(&self, _: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        let mut outputs = Vec::with_capacity(streams.len());
        for tokens in &streams {
            let logits = linear(tokens.x.clone(), cx.leaves.get("weight"), cx.leaves.get("bias"));
            outputs.push(tokens.with(logits));
        }
        outputs.into()
    }

    /// Counts a graph that holds logits, their softmax and their targets.
    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let rows: usize = groups.iter().map(GroupShape::n_rows).sum();
        let flops = 2.0 * (rows * self.input * self.output) as f64;
        let cost = Cost::new(flops, Elements::wide(3.0 * (rows * self.output) as f64));
        (cost, groups.iter().map(|group| GroupShape { width: self.output, ..*group }).collect())
    }
}
