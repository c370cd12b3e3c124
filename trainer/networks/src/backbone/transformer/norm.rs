//! The last layer norm of a transformer. Reading only the class token saves normalizing the others.

use kernels::ops::layer_norm;

use crate::backbone::Readout;
use crate::features::Features;
use crate::params::ParamSpec;
use crate::unit::{Context, Cost, GroupShape, StageOutput, Unit};

/// The last layer norm.
pub(in crate::backbone) struct Norm {
    /// Channels of a token.
    pub width: usize,
    /// Tokens that leave the network.
    pub readout: Readout,
    /// Number that is added to the variance.
    pub epsilon: f64,
}

impl Unit for Norm {
    fn name(&self) -> &str {
        "norm"
    }

    fn params(&self) -> Vec<ParamSpec> {
        vec![ParamSpec::vector("weight", self.width, 1.0), ParamSpec::vector("bias", self.width, 0.0)]
    }

    fn forward(&self, _: usize, groups: Vec<Features>, cx: &Context<'_>) -> StageOutput {
        let norm = |group: &Features| {
            let read = match self.readout {
                Readout::Pooled => group.pooled(),
                Readout::All => group.clone(),
            };
            let (gain, bias) = (cx.leaves.get("weight"), cx.leaves.get("bias"));
            read.with(layer_norm(read.x.clone(), gain, bias, self.epsilon))
        };
        groups.iter().map(norm).collect::<Vec<_>>().into()
    }

    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let read = |group: &GroupShape| match self.readout {
            Readout::Pooled => group.pooled(),
            Readout::All => *group,
        };
        let graph = groups.iter().map(|group| (group.n_rows() * self.width) as f64).sum();
        (Cost { flops: 0.0, graph }, groups.iter().map(read).collect())
    }
}
