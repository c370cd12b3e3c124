//! ConvNeXt (Liu et al. 2022), as timm builds it and DINOv3 distills it: blocks of depthwise
//! convolutions and MLPs.
//!
//! ```text
//! stem         norm(W · patches + b)                            patches of `patch_px`, four pixels in the published networks
//! block        x ← x + drop(γ ⊙ W₂ gelu(W₁ norm(dw(x))))        dw 7×7 for each channel, four times as many hidden channels
//! stages       4, of widths w, 2w, 4w, 8w; each but the first begins with conv 2×2/2 of norm(x)
//! last norm    norm of the mean over the last grid, and of its cells
//! ```
//!
//! Norms are layer norms over channels. The feature of a view is the normalized mean. Parameter
//! names and shapes are timm's.

use burn_tensor::Tensor;
use kernels::ops::{
    SequenceFactors, Window, apply_to_kept, conv, depthwise_branch, grid_mean, in_f32, layer_norm, linear,
    mlp,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{BackboneConfig, Levels, Readout, is_rgb, rgb_channels};
use crate::draws::{DrawRules, DropRule};
use crate::params::{Init, ParamSpec};
use crate::tokens::{Sequences, Tokens};
use crate::unit::{Context, Cost, Elements, GroupShape, StageOutput, Unit};

/// Side of the kernels of depthwise convolutions.
const KERNEL: usize = 7;

/// Ratio of the MLP's hidden channels to the block's.
const MLP_RATIO: usize = 4;

/// Epsilon that layer norms add to the variance.
const EPSILON: f64 = 1e-6;

/// Standard deviation of the initial weights, normal numbers cut at ±2.
const INIT_STD: f32 = 0.02;

/// Upper limit of the number of blocks of a stage.
const MAX_DEPTH: usize = 250;

/// A ConvNeXt, as a recipe writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Side of the images that the network is made for, in pixels.
    pub image_px: usize,
    /// Number of blocks of each stage: `[3, 3, 9, 3]` in ConvNeXt-T, `[3, 3, 27, 3]` in S, B and L.
    pub depths: [usize; 4],
    /// Channels of the first stage, which every later stage doubles: 96 in ConvNeXt-T and S, 128 in
    /// B, 192 in L.
    pub width: usize,
    /// Side of a patch of the stem, in pixels; 4 by default, 1 or 2 for images of 32 px.
    #[serde(default = "default_patch_px", skip_serializing_if = "is_default_patch_px")]
    pub patch_px: usize,
    /// Initial LayerScale; 1e-6 by default.
    #[serde(default = "default_layer_scale")]
    pub layer_scale: f32,
    /// Drop-path rate of the last block; the rates of blocks before it grow linearly from 0.
    #[serde(default)]
    pub drop_path: f32,
    /// Number of channels of an image; 3 by default. A recipe sets data.channels, which this
    /// follows.
    #[serde(default = "rgb_channels", skip_serializing_if = "is_rgb")]
    pub channels: usize,
}

fn default_patch_px() -> usize {
    4
}

fn is_default_patch_px(patch_px: &usize) -> bool {
    *patch_px == default_patch_px()
}

fn default_layer_scale() -> f32 {
    1e-6
}

impl Config {
    /// Returns the channels of stage `stage`.
    pub fn stage_width(&self, stage: usize) -> usize {
        self.width << stage
    }

    fn block(&self, stage: usize, index: usize) -> Block {
        let n_before: usize = self.depths[..stage].iter().sum();
        let n_blocks: usize = self.depths.iter().sum();
        let depth = (n_before + index) as f32 / (n_blocks - 1).max(1) as f32;
        Block {
            name: format!("stages.{stage}.blocks.{index}"),
            width: self.stage_width(stage),
            layer_scale: self.layer_scale,
            drop_path: self.drop_path * depth,
        }
    }
}

impl BackboneConfig for Config {
    fn validate(&self) -> Result<(), String> {
        if !(1..=65_536).contains(&self.image_px) || !(1..=4096).contains(&self.width) {
            return Err("model.image_px must lie in 1..=65536 and model.width in 1..=4096".into());
        }
        if !self.depths.iter().all(|depth| (1..=MAX_DEPTH).contains(depth)) {
            return Err(format!("model.depths must lie in 1..={MAX_DEPTH}"));
        }
        if !(1..=64).contains(&self.patch_px) {
            return Err("model.patch_px must lie in 1..=64".into());
        }
        if !(0.0..1.0).contains(&self.drop_path) {
            return Err(format!("model.drop_path {} must lie in 0..1", self.drop_path));
        }
        if (0.0..=1e3).contains(&self.layer_scale) {
            Ok(())
        } else {
            Err("model.layer_scale must lie in 0..=1000".into())
        }
    }

    fn units(&self, readout: Readout) -> Vec<Box<dyn Unit>> {
        let mut units: Vec<Box<dyn Unit>> =
            vec![Box::new(Stem { n_channels: self.channels, patch_px: self.patch_px, width: self.width })];
        for (stage, depth) in self.depths.into_iter().enumerate() {
            if stage > 0 {
                let name = format!("stages.{stage}.downsample");
                units.push(Box::new(Downsample { name, input: self.stage_width(stage - 1) }));
            }
            for index in 0..depth {
                units.push(Box::new(self.block(stage, index)));
            }
        }
        units.push(Box::new(Norm { width: self.width(), readout }));
        units
    }

    fn levels(&self) -> Levels {
        // The stem comes first, and a unit between every two stages.
        let mut units: Vec<usize> =
            (0..4).map(|stage: usize| self.depths[..=stage].iter().sum::<usize>() + stage).collect();
        // The last norm ends the last stage.
        units[3] += 1;
        Levels { units, readout: None }
    }

    fn width(&self) -> usize {
        self.stage_width(3)
    }

    fn n_channels(&self) -> usize {
        self.channels
    }

    fn set_n_channels(&mut self, n_channels: usize) {
        self.channels = n_channels;
    }

    fn cell_px(&self) -> usize {
        self.patch_px
    }

    fn stride_px(&self) -> usize {
        self.patch_px * 8
    }

    fn image_px(&self) -> usize {
        self.image_px
    }

    #[cfg(feature = "testing")]
    fn examples() -> Vec<Self> {
        let small = Self {
            image_px: 16,
            depths: [1, 1, 2, 1],
            width: 6,
            patch_px: 1,
            layer_scale: 0.7,
            drop_path: 0.0,
            channels: rgb_channels(),
        };
        vec![small.clone(), Self { width: 4, patch_px: 2, drop_path: 0.3, channels: 5, ..small }]
    }
}

fn gain_and_bias(name: &str, width: usize) -> [ParamSpec; 2] {
    let gain = ParamSpec::vector(format!("{name}.weight"), width, 1.0);
    let bias = ParamSpec::vector(format!("{name}.bias"), width, 0.0);
    [gain, bias]
}

fn weight_and_bias(name: &str, shape: impl Into<Vec<usize>>) -> [ParamSpec; 2] {
    let weight = ParamSpec::weight(format!("{name}.weight"), shape, Init::TruncNormal(INIT_STD));
    let bias = ParamSpec::vector(format!("{name}.bias"), weight.shape[0], 0.0);
    [weight, bias]
}

/// Applies the layer norm `name` to `x` of `[.., D]`.
fn norm<const D: usize>(name: &str, x: Tensor<D>, cx: &Context<'_>) -> Tensor<D> {
    let gain = cx.leaves.get(&format!("{name}.weight"));
    let bias = cx.leaves.get(&format!("{name}.bias"));
    layer_norm(x, gain, bias, EPSILON)
}

/// First unit: a projection of patches, and a norm.
struct Stem {
    n_channels: usize,
    patch_px: usize,
    width: usize,
}

impl Unit for Stem {
    fn name(&self) -> &str {
        "stem"
    }

    fn params(&self) -> Vec<ParamSpec> {
        let d = self.width;
        let p = self.patch_px;
        let projection = weight_and_bias("0", [d, self.n_channels, p, p]);
        let projection = projection.map(|param| ParamSpec { projects_patches: true, ..param });
        projection.into_iter().chain(gain_and_bias("1", d)).collect()
    }

    fn forward(&self, _: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        let mut outputs = Vec::with_capacity(streams.len());
        for tokens in streams {
            let weight = cx.leaves.matrix("0.weight");
            let h = in_f32(linear(cx.rounded(tokens.x.clone()), weight, cx.leaves.bias("0.bias")));
            outputs.push(tokens.with(norm("1", h, cx)));
        }
        outputs.into()
    }

    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let rows: usize = groups.iter().map(GroupShape::n_rows).sum();
        let d = self.width as f64;
        let input = (self.n_channels * self.patch_px * self.patch_px) as f64;
        let graph = Elements { products: rows as f64 * input, wide: rows as f64 * d, ..Elements::default() };
        let cost = Cost::new(2.0 * rows as f64 * input * d, graph);
        (cost, groups.iter().map(|group| GroupShape { width: self.width, ..*group }).collect())
    }
}

/// Windows of a [`Downsample`].
const HALVES: Window = Window { stride: 2, padding: 0 };

/// Beginning of a stage: a norm, and a convolution that halves the grid and doubles the channels.
struct Downsample {
    name: String,
    input: usize,
}

impl Unit for Downsample {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<ParamSpec> {
        let convolution = weight_and_bias("1", [2 * self.input, self.input, 2, 2]);
        gain_and_bias("0", self.input).into_iter().chain(convolution).collect()
    }

    fn forward(&self, _: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        let mut outputs = Vec::with_capacity(streams.len());
        for tokens in streams {
            let x = tokens.with(norm("0", tokens.x.clone(), cx)).by_sequence();
            let (h, grid) = conv(cx.rounded(x), tokens.grid(), cx.leaves.stored("1.weight"), HALVES);
            let bias = in_f32(cx.leaves.get::<1>("1.bias"));
            outputs.push(Tokens::on_grid(in_f32(h) + bias.unsqueeze(), grid));
        }
        outputs.into()
    }

    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let shapes: Vec<GroupShape> = groups
            .iter()
            .map(|group| GroupShape {
                grid: group.grid.map(|side| HALVES.output(side, 2)),
                width: 2 * self.input,
                ..*group
            })
            .collect();
        let width = self.input as f64;
        let mut costs = Vec::with_capacity(groups.len());
        for (before, after) in groups.iter().zip(&shapes) {
            costs.push(Cost::new(
                2.0 * after.n_rows() as f64 * 4.0 * width * 2.0 * width,
                // Input and output of the norm.
                Elements::wide(before.n_rows() as f64 * width)
                    + Elements::products(before.n_rows() as f64 * width),
            ));
        }
        (costs.into_iter().sum(), shapes)
    }
}

/// Depthwise convolution, norm and MLP inside a residual branch.
struct Block {
    name: String,
    width: usize,
    layer_scale: f32,
    drop_path: f32,
}

impl Block {
    /// Returns the rule by which the branch is dropped.
    fn drop_rule(&self) -> DropRule {
        DropRule { share: self.drop_path, ..DropRule::default() }
    }
}

impl Unit for Block {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<ParamSpec> {
        let d = self.width;
        let hidden = MLP_RATIO * self.width;
        let mut params = Vec::from(weight_and_bias("conv_dw", [d, 1, KERNEL, KERNEL]));
        params.extend(gain_and_bias("norm", d));
        params.extend(weight_and_bias("mlp.fc1", [hidden, d]));
        params.extend(weight_and_bias("mlp.fc2", [d, hidden]));
        params.push(ParamSpec::vector("gamma", d, self.layer_scale));
        params
    }

    fn forward(&self, _: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        let mut outputs = Vec::with_capacity(streams.len());
        for (index, tokens) in streams.into_iter().enumerate() {
            let weight = cx.leaves.get("conv_dw.weight");
            let bias = cx.leaves.get("conv_dw.bias");
            let (h, skip) = depthwise_branch(tokens.by_sequence(), tokens.grid(), weight, bias);
            let shape = h.dims();
            let lengths = tokens.lengths();
            let factors = cx.draws.factors(index..index + 1, 0);
            let factors = factors.as_deref();
            let h = apply_to_kept(h.reshape(tokens.x.dims()), &lengths, factors, |h, _| {
                let h = cx.rounded(norm("norm", h, cx));
                mlp(h, cx.linear_params("mlp.fc1"), cx.linear_params("mlp.fc2"))
            });
            let factors = factors.map(|factors| SequenceFactors { factors, lengths: &lengths });
            let y = skip.join(h.reshape(shape), Some(cx.leaves.get("gamma")), factors);
            outputs.push(tokens.with(y.reshape(tokens.x.dims())));
        }
        outputs.into()
    }

    /// Counts a graph that holds per cell: the input, inputs and outputs of the norm, the hidden
    /// layer before its GELU, and the output of the branch.
    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let d = self.width as f64;
        let ratio = MLP_RATIO as f64;
        let taps = (KERNEL * KERNEL) as f64;
        let mut costs = Vec::with_capacity(groups.len());
        for group in groups {
            let rows = group.n_rows() as f64;
            let computed = self.drop_rule().computed_share(group.drops);
            // The input and the output of the convolution are those of all views; the rows of the
            // views for which the branch is computed are copied from that output.
            let copies = if computed < 1.0 { computed } else { 0.0 };
            costs.push(Cost::new(
                rows * (2.0 * taps * d + computed * 4.0 * ratio * d * d),
                Elements::wide(rows * d * 2.0)
                    + Elements::products(rows * d * (copies + computed * (2.0 + ratio))),
            ));
        }
        (costs.into_iter().sum(), groups.to_vec())
    }

    fn draw_rules(&self) -> DrawRules {
        DrawRules { drop: self.drop_rule(), ..DrawRules::default() }
    }
}

/// Last unit: the norm of the mean over the grid and, if all features are read, of its cells.
struct Norm {
    width: usize,
    readout: Readout,
}

impl Unit for Norm {
    fn name(&self) -> &str {
        "head.norm"
    }

    fn params(&self) -> Vec<ParamSpec> {
        vec![ParamSpec::vector("weight", self.width, 1.0), ParamSpec::vector("bias", self.width, 0.0)]
    }

    fn forward(&self, _: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        let gain = cx.leaves.get::<1>("weight");
        let bias = cx.leaves.get::<1>("bias");
        let mut outputs = Vec::with_capacity(streams.len());
        for tokens in streams {
            let cells = tokens.by_sequence();
            let [n, _, d] = cells.dims();
            let mean = grid_mean(cells.clone());
            let sequences = match self.readout {
                Readout::Pooled => mean,
                Readout::All => Tensor::cat(vec![mean, cells], 1),
            };
            let x = layer_norm(sequences, gain.clone(), bias.clone(), EPSILON).reshape([-1, d as i32]);
            let group = match self.readout {
                Readout::Pooled => Sequences::vectors(n),
                Readout::All => Sequences { n_prefix: 1, ..Sequences::on_grid(n, tokens.grid()) },
            };
            outputs.push(Tokens::new(x, vec![group]));
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
                Readout::All => GroupShape { n_prefix: 1, ..*group },
            })
            .collect();
        (cost, outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of parameters of timm's and transformers' networks without classifiers.
    #[test]
    fn numbers_of_parameters_are_the_published_ones() {
        for (depths, width, numel) in [
            ([3, 3, 9, 3], 96, 27_820_128),
            ([3, 3, 27, 3], 96, 49_454_688),
            ([3, 3, 27, 3], 128, 87_566_464),
            ([3, 3, 27, 3], 192, 196_230_336),
        ] {
            let config: Config =
                toml::from_str(&format!("image_px = 224\ndepths = {depths:?}\nwidth = {width}")).unwrap();
            let units = config.units(Readout::Pooled);
            assert_eq!(units.iter().flat_map(|unit| unit.params()).map(|p| p.numel()).sum::<usize>(), numel);
        }
    }
}
