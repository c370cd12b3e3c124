//! The last layer norm of a transformer. If only the class token is read, the other tokens are not
//! normalized.
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
    /// Normalizes the tokens of `group`, whose index is `index`.
    fn normalize(&self, index: usize, group: &Features, cx: &Context<'_>) -> Tensor<3> {
        let x = group.x.clone();
        if index == 0 || !self.has_local {
            return self.layer_norm(x, "", cx);
        }
        let [b, n, d] = x.dims();
        let p = group.n_prefix;
        let prefix = self.layer_norm(x.clone().slice([0..b, 0..p, 0..d]), &format!("{LOCAL}."), cx);
        if p == n {
            return prefix;
        }
        let patches = self.layer_norm(x.slice([0..b, p..n, 0..d]), "", cx);
        Tensor::cat(vec![prefix, patches], 1)
    }

    /// Applies the layer norm whose parameters have names with `prefix`.
    fn layer_norm(&self, x: Tensor<3>, prefix: &str, cx: &Context<'_>) -> Tensor<3> {
        let gain = cx.leaves.get(&format!("{prefix}weight"));
        let bias = cx.leaves.get(&format!("{prefix}bias"));
        layer_norm(x, gain, bias, self.epsilon)
    }
}

impl Unit for Norm {
    fn name(&self) -> &str {
        "norm"
    }

    fn params(&self) -> Vec<ParamSpec> {
        let gain = ParamSpec::vector("weight", self.width, 1.0);
        let bias = ParamSpec::vector("bias", self.width, 0.0);
        let mut params = vec![gain, bias];
        if self.has_local {
            let gain = ParamSpec::vector(format!("{LOCAL}.weight"), self.width, 1.0);
            let bias = ParamSpec::vector(format!("{LOCAL}.bias"), self.width, 0.0);
            params.extend([gain.or_like("weight"), bias.or_like("bias")]);
        }
        params
    }

    fn forward(&self, _: usize, groups: Vec<Features>, cx: &Context<'_>) -> StageOutput {
        groups
            .iter()
            .enumerate()
            .map(|(index, group)| {
                let selected = match self.readout {
                    Readout::Pooled => group.pooled(),
                    Readout::All => group.clone(),
                };
                selected.with(self.normalize(index, &selected, cx))
            })
            .collect::<Vec<_>>()
            .into()
    }

    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let graph: usize = groups.iter().map(|group| group.n_rows() * self.width).sum();
        let cost = Cost::new(0.0, Elements::wide(graph as f64));
        let outputs = groups
            .iter()
            .map(|group| match self.readout {
                Readout::Pooled => group.pooled(),
                Readout::All => *group,
            })
            .collect();
        (cost, outputs)
    }
}
