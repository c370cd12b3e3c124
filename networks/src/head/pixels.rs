//! Decoders: heads that score the classes of pixels, from the cells of the grid.
//!
//! ```text
//! linear   s = W x + b                          [M, D] → [M, C]
//! conv     s = W gelu(norm(V * x)) + b          V * x convolves 3 × 3 cells, [M, D] → [M, H]
//! ```
//!
//! Scores of pixels are interpolated from those of cells. The norm is a layer normalization of the
//! channels of a cell, as in ConvNeXt: unlike the batch normalization of most decoders it needs no
//! statistics over the batch, so that the unit is part of the loss's graph, and the scores of an
//! image depend on no other.

use kernels::ops::{Window, conv, gelu, layer_norm};
use serde::{Deserialize, Serialize};

use super::linear::Linear;
use crate::params::{Init, ParamSpec};
use crate::tokens::Tokens;
use crate::unit::{Context, Cost, Elements, GroupShape, StageOutput, Unit};

/// Side of the convolution's kernel, in cells.
const KERNEL: usize = 3;

/// Windows of the convolution, which keep the grid.
const WINDOW: Window = Window { stride: 1, padding: KERNEL / 2 };

/// Name of the unit that scores the classes, the last of a decoder.
pub const SCORES: &str = "decoder.scores";

/// Name of the unit before it that convolves cells.
pub const HIDDEN: &str = "decoder.hidden";

/// Number that the norm adds to the variance.
pub const EPSILON: f64 = 1e-6;

/// Layers of a decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PixelDecoder {
    /// A linear layer.
    Linear,
    /// A convolution, a norm and a GELU, and a linear layer.
    Conv {
        /// Channels of the convolution.
        width: usize,
    },
}

/// Sizes of a decoder.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecoderSizes {
    /// Channels of the features.
    pub width: usize,
    /// Number of classes.
    pub n_classes: usize,
    /// Number of pixels that a cell covers.
    pub n_pixels: usize,
    /// Standard deviation of the initial weights of the linear layer.
    pub init_std: f32,
}

impl PixelDecoder {
    /// Returns the units.
    pub fn units(self, sizes: DecoderSizes) -> Vec<Box<dyn Unit>> {
        let DecoderSizes { width, n_classes, n_pixels, init_std } = sizes;
        let mut units: Vec<Box<dyn Unit>> = Vec::new();
        let mut input = width;
        if let Self::Conv { width: hidden } = self {
            units.push(Box::new(Hidden { input, width: hidden }));
            input = hidden;
        }
        let layer = Linear { name: SCORES.into(), input, output: n_classes, init_std };
        units.push(Box::new(Scores { layer, n_pixels }));
        units
    }
}

/// A convolution of cells, a norm and a GELU.
struct Hidden {
    /// Input channels.
    input: usize,
    /// Output channels.
    width: usize,
}

impl Unit for Hidden {
    fn name(&self) -> &str {
        HIDDEN
    }

    fn params(&self) -> Vec<ParamSpec> {
        let fan_in = KERNEL * KERNEL * self.input;
        // PyTorch's default.
        let init = Init::Uniform(1.0 / (fan_in as f32).sqrt());
        vec![
            ParamSpec::weight("conv.weight", [self.width, self.input, KERNEL, KERNEL], init),
            ParamSpec::vector("norm.weight", self.width, 1.0),
            ParamSpec::vector("norm.bias", self.width, 0.0),
        ]
    }

    fn forward(&self, _: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        let mut outputs = Vec::with_capacity(streams.len());
        for tokens in &streams {
            let weight = cx.leaves.get("conv.weight");
            let (y, _) = conv(tokens.by_sequence(), tokens.grid(), weight, WINDOW);
            let [n, n_cells, width] = y.dims();
            let y = y.reshape([n * n_cells, width]);
            let y = layer_norm(y, cx.leaves.get("norm.weight"), cx.leaves.get("norm.bias"), EPSILON);
            outputs.push(tokens.with(gelu(y)));
        }
        outputs.into()
    }

    /// Counts a graph that holds the input, and the values before and after norm and GELU.
    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let rows: usize = groups.iter().map(GroupShape::n_rows).sum();
        let taps = KERNEL * KERNEL * self.input;
        let flops = 2.0 * (rows * taps * self.width) as f64;
        let cost = Cost::new(flops, Elements::wide((rows * (self.input + 3 * self.width)) as f64));
        (cost, groups.iter().map(|group| GroupShape { width: self.width, ..*group }).collect())
    }
}

/// A linear layer that scores the classes.
struct Scores {
    layer: Linear,
    /// Number of pixels that a cell covers.
    n_pixels: usize,
}

impl Unit for Scores {
    fn name(&self) -> &str {
        self.layer.name()
    }

    fn params(&self) -> Vec<ParamSpec> {
        self.layer.params()
    }

    fn forward(&self, stage: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        self.layer.forward(stage, streams, cx)
    }

    /// Counts the scores of cells, and those of all pixels with targets and gradients, which the
    /// loss holds on a GPU.
    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let rows: usize = groups.iter().map(GroupShape::n_rows).sum();
        let loss_elements = 3.0 * (rows * self.n_pixels * self.layer.output) as f64;
        let (cost, outputs) = self.layer.cost(groups);
        (Cost { loss_elements, ..cost }, outputs)
    }
}
