//! A backbone for tests: cells of pixels, a batch normalization over the whole batch, and a
//! projection.
//!
//! ```text
//! h = W₁ · cells + b₁              [B·N, Cp²] → [B·N, D]
//! y = W₂ · gelu(norm(h)) + b₂
//! ```

use burn_tensor::Tensor;
use kernels::ops::{gelu, linear, normalize};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{BackboneConfig, Levels, Readout, is_rgb, rgb_channels};
use crate::batch_norm::BatchNorm;
use crate::params::{Init, ParamSpec};
use crate::tokens::Tokens;
use crate::unit::{Context, Cost, Elements, GroupShape, StageOutput, Unit};

/// Settings of the toy, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Channels.
    pub width: usize,
    /// Number of channels of an image; 3 by default. A recipe sets data.channels, which this
    /// follows.
    #[serde(default = "rgb_channels", skip_serializing_if = "is_rgb")]
    pub channels: usize,
}

impl BackboneConfig for Config {
    fn validate(&self) -> Result<(), String> {
        if self.width == 0 { Err("model.width must be at least 1".into()) } else { Ok(()) }
    }

    fn units(&self, _: Readout) -> Vec<Box<dyn Unit>> {
        vec![
            Box::new(Affine { name: "stem", input: self.channels * 4 * 4, width: self.width }),
            Box::new(Norm(BatchNorm { gain: Some(1.2), ..BatchNorm::new("norm", self.width) })),
            Box::new(Affine { name: "project", input: self.width, width: self.width }),
        ]
    }

    fn levels(&self) -> Levels {
        Levels { units: vec![0, 1], readout: Some(2) }
    }

    fn width(&self) -> usize {
        self.width
    }

    fn n_channels(&self) -> usize {
        self.channels
    }

    fn set_n_channels(&mut self, n_channels: usize) {
        self.channels = n_channels;
    }

    fn cell_px(&self) -> usize {
        4
    }

    fn stride_px(&self) -> usize {
        4
    }

    fn image_px(&self) -> usize {
        16
    }

    fn examples() -> Vec<Self> {
        vec![Self { width: 6, channels: rgb_channels() }]
    }
}

struct Affine {
    name: &'static str,
    input: usize,
    width: usize,
}

impl Unit for Affine {
    fn name(&self) -> &str {
        self.name
    }

    fn params(&self) -> Vec<ParamSpec> {
        let weight = ParamSpec::weight("weight", [self.width, self.input], Init::Uniform(0.4));
        vec![weight, ParamSpec::vector("bias", self.width, 0.1)]
    }

    fn forward(&self, _: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        let mut outputs = Vec::with_capacity(streams.len());
        for tokens in &streams {
            let x = cx.rounded(tokens.x.clone());
            outputs.push(tokens.with(linear(x, cx.leaves.stored("weight"), cx.leaves.bias("bias"))));
        }
        outputs.into()
    }

    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let rows: usize = groups.iter().map(GroupShape::n_rows).sum();
        let flops = 2.0 * (rows * self.input * self.width) as f64;
        let outputs = groups.iter().map(|group| GroupShape { width: self.width, ..*group }).collect();
        (Cost::new(flops, Elements::wide((rows * self.width) as f64)), outputs)
    }
}

/// A batch normalization and an activation.
struct Norm(BatchNorm);

impl Unit for Norm {
    fn name(&self) -> &str {
        "norm"
    }

    fn params(&self) -> Vec<ParamSpec> {
        self.0.params()
    }

    fn n_stages(&self) -> usize {
        2
    }

    fn forward(&self, stage: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        let mut outputs = Vec::with_capacity(streams.len());
        if stage == 0 {
            let mut sums = Vec::with_capacity(streams.len());
            for tokens in streams {
                let (x, stream_sums) = self.0.moments(tokens.x.clone(), cx);
                outputs.push(tokens.with(x));
                sums.push(stream_sums);
            }
            return StageOutput { streams: outputs, sums: cx.sets.sums(sums) };
        }
        for (tokens, set) in streams.iter().zip(&cx.sets.0) {
            let affine = self.0.affine(cx.totals.get(*set).cloned(), cx);
            outputs.push(tokens.with(gelu(normalize(tokens.x.clone(), affine, None, false))));
        }
        outputs.into()
    }

    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let rows: usize = groups.iter().map(GroupShape::n_rows).sum();
        (Cost::new(0.0, Elements::wide((4 * rows * self.0.width) as f64)), groups.to_vec())
    }

    fn observe(&self, totals: &[Vec<Tensor<1>>], cx: &Context<'_>) -> Vec<(String, Tensor<1>)> {
        self.0.observe(totals.concat(), cx)
    }
}
