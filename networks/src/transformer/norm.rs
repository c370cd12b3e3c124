//! The last layer norm of a transformer. If only the class token is read, the other tokens are not
//! normalized.
//!
//! The class token and registers of the smaller views may have a norm of their own, as in DINOv3's
//! largest network (Siméoni et al. 2025). Only training uses it.

use burn_tensor::Tensor;
use kernels::ops::layer_norm;

use crate::params::ParamSpec;
use crate::readout::Readout;
use crate::tokens::Tokens;
use crate::unit::{Context, Cost, Elements, GroupShape, StageOutput, Unit};

/// Name of the norm of the smaller views' class token and registers.
const LOCAL: &str = "local_class";

/// The last layer norm.
pub(crate) struct Norm {
    /// Name of the unit.
    pub name: String,
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
    /// Normalizes all tokens of `tokens`, whose first group has the index `first_group`.
    fn normalize(&self, first_group: usize, tokens: &Tokens, cx: &Context<'_>) -> Tensor<2> {
        if !self.has_local {
            return self.layer_norm(tokens.x.clone(), "", cx);
        }
        let mut parts = Vec::with_capacity(tokens.groups.len());
        for (index, group) in tokens.split_groups().into_iter().enumerate() {
            if first_group + index == 0 {
                parts.push(self.layer_norm(group.x, "", cx));
                continue;
            }
            let x = group.by_sequence();
            let [b, n, d] = x.dims();
            let p = group.only_group().n_prefix;
            let mut normalized =
                vec![self.layer_norm(x.clone().slice([0..b, 0..p, 0..d]), &format!("{LOCAL}."), cx)];
            if p < n {
                normalized.push(self.layer_norm(x.slice([0..b, p..n, 0..d]), "", cx));
            }
            parts.push(Tensor::cat(normalized, 1).reshape([b * n, d]));
        }
        if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 0) }
    }

    /// Applies the layer norm whose parameters have names with `prefix`.
    fn layer_norm<const D: usize>(&self, x: Tensor<D>, prefix: &str, cx: &Context<'_>) -> Tensor<D> {
        let gain = cx.leaves.get(&format!("{prefix}weight"));
        let bias = cx.leaves.get(&format!("{prefix}bias"));
        layer_norm(x, gain, bias, self.epsilon)
    }
}

impl Unit for Norm {
    fn name(&self) -> &str {
        &self.name
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

    fn forward(&self, _: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        let mut outputs = Vec::with_capacity(streams.len());
        let mut first_group = 0;
        for tokens in &streams {
            let has_prefix = tokens.groups.iter().all(|group| group.n_prefix > 0);
            outputs.push(match self.readout {
                Readout::All => tokens.with(self.normalize(first_group, tokens, cx)),
                Readout::Pooled if has_prefix => {
                    let pooled = tokens.pooled();
                    pooled.with(self.normalize(first_group, &pooled, cx))
                }
                // A mean is taken over normalized cells.
                Readout::Pooled => tokens.with(self.normalize(first_group, tokens, cx)).pooled(),
            });
            first_group += tokens.groups.len();
        }
        outputs.into()
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
