//! A projection of three layers (DINO: Caron et al. 2021, appendix C). The formula leaves out the
//! biases.
//!
//! ```text
//! z = W₃ gelu(W₂ gelu(W₁ x))          [M, D] → [M, bottleneck]
//! ```

use kernels::ops::{gelu, linear};

use crate::features::Features;
use crate::params::{Init, ParamSpec};
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
    fn layers(&self) -> [(&'static str, usize, usize); 3] {
        [("0", self.hidden, self.input), ("2", self.hidden, self.hidden), ("4", self.output, self.hidden)]
    }
}

impl Unit for Mlp {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<ParamSpec> {
        self.layers()
            .into_iter()
            .flat_map(|(name, output, input)| {
                let init = Init::TruncNormal(self.init_std);
                [
                    ParamSpec::weight(format!("{name}.weight"), [output, input], init),
                    ParamSpec::vector(format!("{name}.bias"), output, 0.0),
                ]
            })
            .collect()
    }

    fn forward(&self, _: usize, groups: Vec<Features>, cx: &Context<'_>) -> StageOutput {
        let layer = |x, i: &str| {
            linear(x, cx.leaves.get(&format!("{i}.weight")), cx.leaves.get(&format!("{i}.bias")))
        };
        groups
            .iter()
            .map(|group| {
                let x = gelu(layer(group.x.clone(), "0"));
                let x = gelu(layer(x, "2"));
                group.with(layer(x, "4"))
            })
            .collect::<Vec<_>>()
            .into()
    }

    /// Counts a graph that holds the values before and after each activation.
    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let rows: usize = groups.iter().map(GroupShape::n_rows).sum();
        let weights: usize = self.layers().iter().map(|(_, output, input)| output * input).sum();
        let outputs: usize = self.layers().iter().map(|(_, output, _)| output).sum();
        let cost = Cost {
            flops: 2.0 * (rows * weights) as f64,
            graph: Elements::wide(3.0 * (rows * outputs) as f64),
        };
        (cost, groups.iter().map(|group| GroupShape { width: self.output, ..*group }).collect())
    }
}
