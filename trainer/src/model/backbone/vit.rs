//! The vision transformer (Dosovitskiy et al. 2021), as DINO and timm build it.
//!
//! ```text
//! patches [B, N, 3p²]  → embed: x = [cls; patches · Wᵀ + b] + pos       [B, 1+N, D]
//! block:  x ← x + drop(ls₁ · attention(norm₁(x)))
//!         x ← x + drop(ls₂ · W₂ gelu(W₁ norm₂(x)))     x in f32, branches in what the run computes in
//! norm:   y = norm(x), all tokens or the class token
//! ```
//!
//! Parameter names and shapes are timm's. The patch embedding is a matrix product on patch
//! vectors: the same numbers as a strided convolution, with a cheap backward pass.

use std::collections::HashMap;
use std::sync::Mutex;

use burn_tensor::{Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::{BackboneConfig, Levels, Readout, pos_embed};
use crate::model::features::Features;
use crate::model::leaves::Leaves;
use crate::model::params::{Init, ParamSpec};
use crate::model::unit::{Context, Cost, GroupShape, StageOutput, Unit};
use crate::ops::{attention, attention_weights, branch, gelu, layer_norm, linear, sequence};

/// Epsilon of every layer norm, as in DINO and timm.
const NORM_EPSILON: f64 = 1e-6;

/// A vision transformer, as a recipe writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Side of the images that the position embedding is made for.
    pub image_px: usize,
    /// Side of a patch.
    pub patch_px: usize,
    /// Channels of a token.
    pub width: usize,
    /// Blocks.
    pub depth: usize,
    /// Attention heads.
    pub heads: usize,
    /// Hidden channels of the MLP over `width`.
    #[serde(default = "default_mlp_ratio")]
    pub mlp_ratio: f64,
    /// Initial LayerScale; absent for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_scale: Option<f32>,
    /// Drop-path rate of the last block; earlier ones grow linearly towards it.
    #[serde(default)]
    pub drop_path: f32,
    /// What is added to the cells of another grid before the position embedding is resampled: 0.1 in DINO's and
    /// DINOv2's code, which matters for weights that were trained with it.
    #[serde(default)]
    pub pos_offset: f64,
    /// Deviation of initial weights. The usual 0.02 suits widths from 384 on; narrow networks
    /// need about `1/√width`, or their branches start out too faint to matter.
    #[serde(default = "default_init_std")]
    pub init_std: f32,
}

fn default_init_std() -> f32 {
    0.02
}

fn default_mlp_ratio() -> f64 {
    4.0
}

impl Config {
    /// Cells along a side of the images that the position embedding is made for.
    fn grid(&self) -> usize {
        self.image_px / self.patch_px
    }

    fn hidden(&self) -> usize {
        (self.mlp_ratio * self.width as f64) as usize
    }
}

impl BackboneConfig for Config {
    fn validate(&self) -> Result<(), String> {
        let sizes = [
            ("image_px", self.image_px),
            ("patch_px", self.patch_px),
            ("width", self.width),
            ("depth", self.depth),
            ("heads", self.heads),
        ];
        if let Some((key, _)) = sizes.iter().find(|(_, value)| *value == 0) {
            return Err(format!("model.{key} must be at least 1"));
        }
        if !self.image_px.is_multiple_of(self.patch_px) {
            return Err(format!(
                "model.image_px {} does not divide by model.patch_px {}",
                self.image_px, self.patch_px
            ));
        }
        if !self.width.is_multiple_of(self.heads) {
            return Err(format!("model.width {} does not divide by model.heads {}", self.width, self.heads));
        }
        if !(0.0..1.0).contains(&self.drop_path) {
            return Err(format!("model.drop_path {} must lie in 0..1", self.drop_path));
        }
        if !(0.0..=1.0).contains(&self.init_std) {
            return Err(format!("model.init_std {} must lie in 0..=1", self.init_std));
        }
        if self.hidden() == 0 {
            return Err(format!("model.mlp_ratio {} leaves no hidden channel", self.mlp_ratio));
        }
        Ok(())
    }

    fn units(&self, readout: Readout) -> Vec<Box<dyn Unit>> {
        let mut units: Vec<Box<dyn Unit>> = vec![Box::new(Embed::new(self))];
        for i in 0..self.depth {
            let share = i as f32 / (self.depth - 1).max(1) as f32;
            units.push(Box::new(Block {
                name: format!("blocks.{i}"),
                config: self.clone(),
                drop_path: self.drop_path * share,
            }));
        }
        units.push(Box::new(Norm { width: self.width, readout }));
        units
    }

    /// Every block, behind the last norm.
    fn levels(&self) -> Levels {
        // The embedding comes first.
        Levels { units: (1..=self.depth).collect(), readout: Some(self.depth + 1) }
    }

    fn width(&self) -> usize {
        self.width
    }

    fn cell_px(&self) -> usize {
        self.patch_px
    }

    fn stride_px(&self) -> usize {
        self.patch_px
    }

    fn image_px(&self) -> usize {
        self.image_px
    }

    #[cfg(test)]
    fn examples() -> Vec<Self> {
        let plain = Self {
            image_px: 16,
            patch_px: 4,
            width: 12,
            depth: 2,
            heads: 2,
            mlp_ratio: 2.0,
            layer_scale: None,
            drop_path: 0.0,
            init_std: 0.2,
            pos_offset: 0.0,
        };
        let full =
            Self { layer_scale: Some(0.5), drop_path: 0.3, pos_offset: 0.1, depth: 3, ..plain.clone() };
        vec![plain, full]
    }
}

/// Patch projection, class token and position embedding.
struct Embed {
    config: Config,
    /// Interpolation matrices by grid; a run sees two or three grids.
    resampling: Mutex<HashMap<[usize; 2], TensorData>>,
}

impl Embed {
    fn new(config: &Config) -> Self {
        Self { config: config.clone(), resampling: Mutex::new(HashMap::new()) }
    }

    /// The position embedding of `grid`, `[1, 1 + N, D]`.
    fn positions(&self, leaves: &Leaves<'_>, grid: [usize; 2]) -> Tensor<3> {
        let embedding = leaves.get::<3>("pos_embed");
        let [_, n, d] = embedding.dims();
        if grid == [self.config.grid(); 2] {
            return embedding;
        }
        let class = embedding.clone().slice([0..1, 0..1]);
        let patches = embedding.slice([0..1, 1..n]).reshape([n - 1, d]);
        let data = {
            // The map stays valid if a holder panics: an entry is inserted whole.
            let mut cache = self.resampling.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let make = || {
                TensorData::new(
                    pos_embed::matrix(self.config.grid(), grid, self.config.pos_offset),
                    [grid[0] * grid[1], n - 1],
                )
            };
            cache.entry(grid).or_insert_with(make).clone()
        };
        let matrix = Tensor::<2>::from_data(data, &patches.device()).cast(patches.dtype());
        let patches = matrix.matmul(patches).reshape([1, grid[0] * grid[1], d]);
        Tensor::cat(vec![class, patches], 1)
    }
}

impl Unit for Embed {
    fn name(&self) -> &str {
        ".embed"
    }

    fn params(&self) -> Vec<ParamSpec> {
        let (d, p) = (self.config.width, self.config.patch_px);
        let n = self.config.grid() * self.config.grid();
        // timm draws convolution weights like PyTorch: uniform in ±1/√fan_in.
        let bound = 1.0 / ((3 * p * p) as f32).sqrt();
        let table = Init::TruncNormal(self.config.init_std);
        let bias =
            ParamSpec { init: Init::Uniform(bound), ..ParamSpec::vector("patch_embed.proj.bias", d, 0.0) };
        vec![
            ParamSpec::weight("patch_embed.proj.weight", [d, 3, p, p], Init::Uniform(bound)),
            bias,
            ParamSpec::weight("cls_token", [1, 1, d], table),
            ParamSpec::weight("pos_embed", [1, 1 + n, d], table),
        ]
    }

    fn forward(&self, _: usize, groups: Vec<Features>, cx: &Context<'_>) -> StageOutput {
        let (d, p) = (self.config.width, self.config.patch_px);
        let embed = |group: &Features| {
            let weight = cx.weight::<4>("patch_embed.proj.weight").reshape([d, 3 * p * p]);
            let patches = linear(cx.rounded(group.x.clone()), weight, cx.weight("patch_embed.proj.bias"));
            let positions = self.positions(cx.leaves, group.grid);
            let x = sequence(cx.leaves.get("cls_token"), patches, positions);
            Features { n_prefix: 1, ..Features::on_grid(x, group.grid) }
        };
        groups.iter().map(embed).collect::<Vec<_>>().into()
    }

    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let (width, p) = (self.config.width, self.config.patch_px);
        let of_group = |group: &GroupShape| GroupShape { n_prefix: 1, width, ..*group };
        let outputs: Vec<GroupShape> = groups.iter().map(of_group).collect();
        let patches: usize = groups.iter().map(GroupShape::n_rows).sum();
        let tokens: usize = outputs.iter().map(GroupShape::n_rows).sum();
        let flops = 2.0 * patches as f64 * (3 * p * p * width) as f64;
        (Cost { flops, graph: 2.0 * (tokens * width) as f64 }, outputs)
    }
}

/// Attention and MLP, each behind a norm and around a residual.
struct Block {
    name: String,
    config: Config,
    drop_path: f32,
}

impl Block {
    fn attend(&self, cx: &Context<'_>, x: Tensor<3>) -> Tensor<3> {
        let qkv = linear(cx.rounded(x), cx.weight("attn.qkv.weight"), cx.weight("attn.qkv.bias"));
        let x = attention(qkv, self.config.heads);
        linear(x, cx.weight("attn.proj.weight"), cx.weight("attn.proj.bias"))
    }

    fn mlp(&self, cx: &Context<'_>, x: Tensor<3>) -> Tensor<3> {
        let x = gelu(linear(cx.rounded(x), cx.weight("mlp.fc1.weight"), cx.weight("mlp.fc1.bias")));
        linear(x, cx.weight("mlp.fc2.weight"), cx.weight("mlp.fc2.bias"))
    }

    /// `x` with the residual branch `number`, which is `f`, of `[B·V, N, D]`.
    fn residual(
        &self,
        cx: &Context<'_>,
        [group, number]: [usize; 2],
        x: Tensor<3>,
        f: impl FnOnce(&Self, &Context<'_>, Tensor<3>) -> Tensor<3>,
    ) -> Tensor<3> {
        let name = |part: &str| format!("norm{}.{part}", number + 1);
        let (gain, bias) = (cx.leaves.get(&name("weight")), cx.leaves.get(&name("bias")));
        let (h, skip) = branch(x, gain, bias, NORM_EPSILON);
        let scale = self.config.layer_scale.map(|_| cx.leaves.get(&format!("ls{}.gamma", number + 1)));
        skip.join(f(self, cx, h), scale, cx.draws.factors(group, number))
    }
}

impl Unit for Block {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<ParamSpec> {
        let (d, hidden) = (self.config.width, self.config.hidden());
        let weight = |name: &str, out, input| {
            ParamSpec::weight(format!("{name}.weight"), [out, input], Init::TruncNormal(self.config.init_std))
        };
        let bias = |name: &str, n| ParamSpec::vector(format!("{name}.bias"), n, 0.0);
        let gain = |name: &str| ParamSpec::vector(format!("{name}.weight"), d, 1.0);
        let mut params = vec![
            gain("norm1"),
            bias("norm1", d),
            weight("attn.qkv", 3 * d, d),
            bias("attn.qkv", 3 * d),
            weight("attn.proj", d, d),
            bias("attn.proj", d),
            gain("norm2"),
            bias("norm2", d),
            weight("mlp.fc1", hidden, d),
            bias("mlp.fc1", hidden),
            weight("mlp.fc2", d, hidden),
            bias("mlp.fc2", d),
        ];
        if let Some(value) = self.config.layer_scale {
            params.extend(["ls1.gamma", "ls2.gamma"].map(|name| ParamSpec::vector(name, d, value)));
        }
        params
    }

    fn forward(&self, _: usize, groups: Vec<Features>, cx: &Context<'_>) -> StageOutput {
        let block = |(group, features): (usize, Features)| {
            let x = self.residual(cx, [group, 0], features.x.clone(), Self::attend);
            features.with(self.residual(cx, [group, 1], x, Self::mlp))
        };
        groups.into_iter().enumerate().map(block).collect::<Vec<_>>().into()
    }

    /// A graph holds for each token, beside the attention weights: the input, both norms in and out, queries, keys
    /// and values, what attention and both branches give, and the hidden layer before and after its GELU. Measured
    /// with `ocelli bench shard`.
    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let (width, hidden) = (self.config.width as f64, self.config.mlp_ratio * self.config.width as f64);
        let of_group = |group: &GroupShape| {
            let (rows, n) = (group.n_rows() as f64, group.n_tokens() as f64);
            let flops = rows * (8.0 * width * width + 4.0 * width * hidden + 4.0 * n * width);
            let graph = rows * (9.0 * width + 2.0 * hidden + self.config.heads as f64 * n);
            Cost { flops, graph }
        };
        (groups.iter().map(of_group).sum(), groups.to_vec())
    }

    fn attention(&self, features: &Features, cx: &Context<'_>) -> Option<Tensor<4>> {
        let (gain, bias) = (cx.leaves.get("norm1.weight"), cx.leaves.get("norm1.bias"));
        let x = layer_norm(features.x.clone(), gain, bias, NORM_EPSILON);
        let qkv = linear(cx.rounded(x), cx.weight("attn.qkv.weight"), cx.weight("attn.qkv.bias"));
        Some(attention_weights(qkv, self.config.heads))
    }

    fn drop_path(&self) -> f32 {
        self.drop_path
    }
}

/// The last layer norm. Reading only the class token saves normalizing the others.
struct Norm {
    width: usize,
    readout: Readout,
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
            read.with(layer_norm(read.x.clone(), gain, bias, NORM_EPSILON))
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
