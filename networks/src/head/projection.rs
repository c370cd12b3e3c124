//! A projection: linear layers with batch normalization and rectifiers between them.
//!
//! ```text
//! h₀ = x      h_i = relu(norm(W_i h_{i-1} + b_i))      z = W_L h_{L-1} + b_L       [M, D] → [M, output]
//! ```
//!
//! Without normalization the unit has one stage; with it every normalized layer ends one. The
//! output may be normalized too, without a gain, as in MoCo v3 (Chen, Xie and He 2021), and layers
//! may have no biases, which a normalization would cancel.

use burn_tensor::Tensor;
use kernels::ops::{normalize, relu};

use super::linear::LinearLayer;
use crate::batch_norm::BatchNorm;
use crate::params::{Init, ParamSpec};
use crate::tokens::Tokens;
use crate::unit::{Context, Cost, Elements, GroupShape, StageOutput, Unit};

/// A projection of any number of layers.
pub struct Projection {
    /// Name of the unit.
    pub name: String,
    /// Input channels, channels of every hidden layer, and output channels.
    pub widths: Vec<usize>,
    /// Layers that are normalized over the batch.
    pub normalizes: Normalizes,
    /// Gives every layer a bias.
    pub has_biases: bool,
}

/// Layers that a projection normalizes over the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Normalizes {
    /// No layer.
    Nothing,
    /// Hidden layers.
    Hidden,
    /// Hidden layers and the output, the latter without a gain.
    All,
}

impl Projection {
    /// Creates the first unit of a head on `width` channels.
    pub fn for_head(width: usize, hidden: &[usize], output: usize, normalizes: bool) -> Self {
        let widths = [&[width], hidden, &[output]].concat();
        let normalizes = if normalizes { Normalizes::Hidden } else { Normalizes::Nothing };
        Self { name: "head.projection".into(), widths, normalizes, has_biases: true }
    }

    fn n_layers(&self) -> usize {
        self.widths.len() - 1
    }

    /// Returns the number of layers that are normalized, from the first on.
    fn n_norms(&self) -> usize {
        match self.normalizes {
            Normalizes::Nothing => 0,
            Normalizes::Hidden => self.n_layers() - 1,
            Normalizes::All => self.n_layers(),
        }
    }

    fn norm(&self, layer: usize) -> BatchNorm {
        let gain = (layer + 1 < self.n_layers()).then_some(1.0);
        BatchNorm { gain, ..BatchNorm::new(format!("norm{layer}"), self.widths[layer + 1]) }
    }

    fn layer(&self, layer: usize) -> LinearLayer {
        let input = self.widths[layer];
        // PyTorch's default.
        let init = Init::Uniform(1.0 / (input as f32).sqrt());
        LinearLayer {
            prefix: format!("linear{layer}."),
            input,
            output: self.widths[layer + 1],
            weight: init,
            bias: self.has_biases.then_some(init),
        }
    }

    /// Applies all layers, without normalization.
    fn unnormalized(&self, tokens: &Tokens, cx: &Context<'_>) -> Tokens {
        let mut x = tokens.x.clone();
        for layer in 0..self.n_layers() {
            x = self.layer(layer).apply(x, cx);
            if layer + 1 < self.n_layers() {
                x = relu(x);
            }
        }
        tokens.with(x)
    }
}

impl Unit for Projection {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<ParamSpec> {
        let mut params = Vec::new();
        for layer in 0..self.n_layers() {
            params.extend(self.layer(layer).params());
            if layer < self.n_norms() {
                params.extend(self.norm(layer).params());
            }
        }
        params
    }

    fn n_stages(&self) -> usize {
        self.n_norms() + 1
    }

    fn forward(&self, stage: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        let mut outputs = Vec::with_capacity(streams.len());
        if self.normalizes == Normalizes::Nothing {
            outputs.extend(streams.iter().map(|tokens| self.unnormalized(tokens, cx)));
            return outputs.into();
        }
        let mut sums = Vec::new();
        for (tokens, set) in streams.into_iter().zip(&cx.sets.0) {
            let mut x = tokens.x.clone();
            if stage > 0 {
                let affine = self.norm(stage - 1).affine(cx.totals.get(*set).cloned(), cx);
                x = normalize(x, affine, None, stage < self.n_layers());
            }
            if stage < self.n_layers() {
                x = self.layer(stage).apply(x, cx);
            }
            if stage < self.n_norms() {
                let stream_sums;
                (x, stream_sums) = self.norm(stage).moments(x, cx);
                sums.push(stream_sums);
            }
            outputs.push(tokens.with(x));
        }
        StageOutput { streams: outputs, sums: cx.sets.sums(sums) }
    }

    fn observe(&self, totals: &[Vec<Tensor<1>>], cx: &Context<'_>) -> Vec<(String, Tensor<1>)> {
        let mut observed = Vec::new();
        for (layer, totals) in totals.iter().enumerate() {
            observed.extend(self.norm(layer).observe(totals.clone(), cx));
        }
        observed
    }

    /// Counts a graph that holds the values before and after each activation.
    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let rows: usize = groups.iter().map(GroupShape::n_rows).sum();
        let flops: f64 = (0..self.n_layers()).map(|layer| self.layer(layer).flops(rows)).sum();
        let outputs: usize = self.widths[1..].iter().sum();
        let cost = Cost::new(flops, Elements::wide(3.0 * (rows * outputs) as f64));
        let width = self.widths[self.n_layers()];
        (cost, groups.iter().map(|group| GroupShape { width, ..*group }).collect())
    }
}
