//! A linear layer: part of heads, and the whole head of a classifier.
//!
//! ```text
//! y = W x + b          [M, D] → [M, C]
//! ```

use burn_tensor::Tensor;
use kernels::ops::{linear, matmul_transposed};

use crate::params::{Init, ParamSpec};
use crate::tokens::Tokens;
use crate::unit::{Context, Cost, Elements, GroupShape, StageOutput, Unit};

/// A linear layer of a unit.
pub(super) struct LinearLayer {
    /// Prefix of the names of its parameters within the unit: empty, or with a dot at the end.
    pub(super) prefix: String,
    /// Input channels, D.
    pub(super) input: usize,
    /// Output channels, C.
    pub(super) output: usize,
    /// Rule for the initial weights.
    pub(super) weight: Init,
    /// Rule for the initial biases; `None` for a layer without biases.
    pub(super) bias: Option<Init>,
}

impl LinearLayer {
    fn param_name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Returns the parameters: `weight`, `[C, D]`, and `bias`, `[C]`.
    pub(super) fn params(&self) -> Vec<ParamSpec> {
        let shape = [self.output, self.input];
        let mut params = vec![ParamSpec::weight(self.param_name("weight"), shape, self.weight)];
        if let Some(init) = self.bias {
            let bias = ParamSpec::vector(self.param_name("bias"), self.output, 0.0);
            params.push(ParamSpec { init, ..bias });
        }
        params
    }

    /// Applies the layer to `x`, `[M, D]`: `[M, C]`.
    pub(super) fn apply(&self, x: Tensor<2>, cx: &Context<'_>) -> Tensor<2> {
        let weight = cx.leaves.get::<2>(&self.param_name("weight"));
        if self.bias.is_none() {
            return matmul_transposed(x, weight);
        }
        linear(x, weight, cx.leaves.get(&self.param_name("bias")))
    }

    /// Returns the operations of the layer on `n_rows` rows.
    pub(super) fn flops(&self, n_rows: usize) -> f64 {
        2.0 * (n_rows * self.input * self.output) as f64
    }
}

/// A unit that is one linear layer.
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

impl Linear {
    fn layer(&self) -> LinearLayer {
        LinearLayer {
            prefix: String::new(),
            input: self.input,
            output: self.output,
            weight: Init::TruncNormal(self.init_std),
            bias: Some(Init::Constant(0.0)),
        }
    }
}

impl Unit for Linear {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<ParamSpec> {
        self.layer().params()
    }

    fn forward(&self, _: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        let layer = self.layer();
        let mut outputs = Vec::with_capacity(streams.len());
        for tokens in &streams {
            outputs.push(tokens.with(layer.apply(tokens.x.clone(), cx)));
        }
        outputs.into()
    }

    /// Counts a graph that holds the output.
    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let rows: usize = groups.iter().map(GroupShape::n_rows).sum();
        let cost = Cost::new(self.layer().flops(rows), Elements::wide((rows * self.output) as f64));
        (cost, groups.iter().map(|group| GroupShape { width: self.output, ..*group }).collect())
    }
}
