//! A projection of three layers (DINO: Caron et al. 2021, appendix C). The formula leaves out the
//! biases.
//!
//! ```text
//! z = W₃ gelu(W₂ gelu(W₁ x))          [M, D] → [M, bottleneck]
//! ```

use burn_tensor::Tensor;
use kernels::ops::{gelu, linear};

use crate::params::{Init, ParamSpec};
use crate::tokens::Tokens;
use crate::unit::{Context, Cost, Elements, GroupShape, StageOutput, Unit};

/// A projection of three layers.
pub struct Mlp {
    /// Name of the unit.
    pub name: String,
    /// Input channels.
    pub input: usize,
    /// Channels of both hidden layers.
    pub hidden: usize,
    /// Output channels.
    pub output: usize,
    /// Standard deviation of the initial weights.
    pub init_std: f32,
}

impl Mlp {
    /// Returns the name, the output channels and the input channels of each layer.
    fn layers(&self) -> [(&'static str, usize, usize); 3] {
        [("0", self.hidden, self.input), ("2", self.hidden, self.hidden), ("4", self.output, self.hidden)]
    }
}

/// Applies the layer `name` to `x` of `[M, D]`.
fn layer(x: Tensor<2>, name: &str, cx: &Context<'_>) -> Tensor<2> {
    let weight = cx.leaves.get(&format!("{name}.weight"));
    let bias = cx.leaves.get(&format!("{name}.bias"));
    linear(x, weight, bias)
}

impl Unit for Mlp {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<ParamSpec> {
        let init = Init::TruncNormal(self.init_std);
        let mut params = Vec::new();
        for (name, output, input) in self.layers() {
            params.push(ParamSpec::weight(format!("{name}.weight"), [output, input], init));
            params.push(ParamSpec::vector(format!("{name}.bias"), output, 0.0));
        }
        params
    }

    fn forward(&self, _: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        let mut outputs = Vec::with_capacity(streams.len());
        for tokens in &streams {
            let x = gelu(layer(tokens.x.clone(), "0", cx));
            let x = gelu(layer(x, "2", cx));
            outputs.push(tokens.with(layer(x, "4", cx)));
        }
        outputs.into()
    }

    /// Counts a graph that holds the values before and after each activation.
    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let rows: usize = groups.iter().map(GroupShape::n_rows).sum();
        let weights: usize = self.layers().iter().map(|(_, output, input)| output * input).sum();
        let outputs: usize = self.layers().iter().map(|(_, output, _)| output).sum();
        let cost = Cost::new(2.0 * (rows * weights) as f64, Elements::wide(3.0 * (rows * outputs) as f64));
        (cost, groups.iter().map(|group| GroupShape { width: self.output, ..*group }).collect())
    }
}
