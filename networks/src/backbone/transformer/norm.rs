//! The last layer norm of a transformer. Reading only the class token saves normalizing the others.
//!
//! The class token and registers of the smaller views may have a norm of their own, as in DINOv3's
//! largest network (Siméoni et al. 2025). Only training uses it.

use burn_tensor::Tensor;
use kernels::ops::layer_norm;

use crate::backbone::Readout;
use crate::features::Features;
use crate::params::ParamSpec;
use crate::unit::{Context, Cost, Elements, GroupShape, StageOutput, Unit};

/// Name of the norm of the smaller views' class token and registers.
const LOCAL: &str = "local_class";

/// The last layer norm.
pub(in crate::backbone) struct Norm {
    /// Channels of a token.
    pub width: usize,
    /// Tokens that leave the network.
    pub readout: Readout,
    /// Number that is added to the variance.
    pub epsilon: f64,
    /// Whether class token and registers of all groups but the first have a norm of their own.
    pub has_local: bool,
}

impl Norm {
    /// Normalizes the tokens of `group`, number `number`.
    fn of_group(&self, number: usize, group: &Features, cx: &Context<'_>) -> Tensor<3> {
        let x = group.x.clone();
        let norm = |x: Tensor<3>, prefix: &str| {
            let [gain, bias] = ["weight", "bias"].map(|part| cx.leaves.get(&format!("{prefix}{part}")));
            layer_norm(x, gain, bias, self.epsilon)
        };
        if number == 0 || !self.has_local {
            return norm(x, "");
        }
        let [b, n, d] = x.dims();
        let p = group.n_prefix;
        let prefix = norm(x.clone().slice([0..b, 0..p, 0..d]), &format!("{LOCAL}."));
        if p == n {
            return prefix;
        }
        Tensor::cat(vec![prefix, norm(x.slice([0..b, p..n, 0..d]), "")], 1)
    }
}

impl Unit for Norm {
    fn name(&self) -> &str {
        "norm"
    }

    fn params(&self) -> Vec<ParamSpec> {
        let of = |prefix: &str| {
            [("weight", 1.0), ("bias", 0.0)]
                .map(|(part, value)| ParamSpec::vector(format!("{prefix}{part}"), self.width, value))
        };
        let local = self.has_local.then(|| {
            of(&format!("{LOCAL}.")).map(|param| {
                let name = param.name[LOCAL.len() + 1..].to_string();
                param.or_like(name)
            })
        });
        of("").into_iter().chain(local.into_iter().flatten()).collect()
    }

    fn forward(&self, _: usize, groups: Vec<Features>, cx: &Context<'_>) -> StageOutput {
        groups
            .iter()
            .enumerate()
            .map(|(number, group)| {
                let read = match self.readout {
                    Readout::Pooled => group.pooled(),
                    Readout::All => group.clone(),
                };
                read.with(self.of_group(number, &read, cx))
            })
            .collect::<Vec<_>>()
            .into()
    }

    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let graph: usize = groups.iter().map(|group| group.n_rows() * self.width).sum();
        (
            Cost { flops: 0.0, graph: Elements::wide(graph as f64) },
            groups
                .iter()
                .map(|group| match self.readout {
                    Readout::Pooled => group.pooled(),
                    Readout::All => *group,
                })
                .collect(),
        )
    }
}
