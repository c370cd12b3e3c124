//! The vision transformer (Dosovitskiy et al. 2021), as DINO and timm build it.
//!
//! ```text
//! patches [B, N, 3p²]  → embed: x = [cls; patches · Wᵀ + b] + pos       [B, 1+N, D]
//! block:  x ← x + drop(ls₁ · attention(norm₁(x)))
//!         x ← x + drop(ls₂ · W₂ gelu(W₁ norm₂(x)))
//! norm:   y = norm(x), all tokens or the class token
//! ```
//!
//! Parameter names and shapes are timm's. The patch embedding is a matrix product on patch
//! vectors: the same numbers as a strided convolution, with a cheap backward pass.

use std::collections::HashMap;
use std::sync::Mutex;

use burn_tensor::{Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::{Readout, pos_embed};
use crate::model::features::Tokens;
use crate::model::leaves::Leaves;
use crate::model::params::{Init, ParamSpec};
use crate::model::unit::{Draws, Unit};
use crate::ops::{attention, gelu, layer_norm, linear};

/// Epsilon of every layer norm, as in DINO and timm.
const NORM_EPSILON: f64 = 1e-6;

/// A vision transformer, as a recipe writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VitConfig {
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

impl VitConfig {
    /// Checks what the units rely on.
    ///
    /// # Errors
    /// The key and what is wrong with it.
    pub fn validate(&self) -> Result<(), String> {
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

    /// Side of the grid that the position embedding is made for.
    pub fn grid(&self) -> usize {
        self.image_px / self.patch_px
    }

    fn hidden(&self) -> usize {
        (self.mlp_ratio * self.width as f64) as usize
    }
}

/// The units of a transformer.
pub(super) fn units(config: &VitConfig, readout: Readout) -> Vec<Box<dyn Unit>> {
    let mut units: Vec<Box<dyn Unit>> = vec![Box::new(Embed::new(config))];
    for i in 0..config.depth {
        let share = i as f32 / (config.depth - 1).max(1) as f32;
        units.push(Box::new(Block {
            name: format!("blocks.{i}"),
            config: config.clone(),
            drop_path: config.drop_path * share,
        }));
    }
    units.push(Box::new(Norm { width: config.width, readout }));
    units
}

/// Patch projection, class token and position embedding.
struct Embed {
    config: VitConfig,
    /// Interpolation matrices by grid; a run sees two or three grids.
    resampling: Mutex<HashMap<[usize; 2], TensorData>>,
}

impl Embed {
    fn new(config: &VitConfig) -> Self {
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
            let make =
                || TensorData::new(pos_embed::matrix(self.config.grid(), grid), [grid[0] * grid[1], n - 1]);
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

    fn forward(&self, leaves: &Leaves<'_>, groups: Vec<Tokens>, _: &Draws) -> Vec<Tokens> {
        let (d, p) = (self.config.width, self.config.patch_px);
        let embed = |tokens: &Tokens| {
            let [b, _, _] = tokens.x.dims();
            let weight = leaves.get::<4>("patch_embed.proj.weight").reshape([d, 3 * p * p]);
            let patches = linear(tokens.x.clone(), weight, leaves.get("patch_embed.proj.bias"));
            let class = leaves.get::<3>("cls_token").expand([b, 1, d]);
            let positions = self.positions(leaves, tokens.grid);
            tokens.with(Tensor::cat(vec![class, patches], 1) + positions)
        };
        groups.iter().map(embed).collect()
    }
}

struct Block {
    name: String,
    config: VitConfig,
    drop_path: f32,
}

impl Block {
    fn attend(&self, leaves: &Leaves<'_>, x: Tensor<3>) -> Tensor<3> {
        let x = layer_norm(x, leaves.get("norm1.weight"), leaves.get("norm1.bias"), NORM_EPSILON);
        let qkv = linear(x, leaves.get("attn.qkv.weight"), leaves.get("attn.qkv.bias"));
        let x = attention(qkv, self.config.heads);
        let x = linear(x, leaves.get("attn.proj.weight"), leaves.get("attn.proj.bias"));
        self.scale(leaves, "ls1.gamma", x)
    }

    fn mlp(&self, leaves: &Leaves<'_>, x: Tensor<3>) -> Tensor<3> {
        let x = layer_norm(x, leaves.get("norm2.weight"), leaves.get("norm2.bias"), NORM_EPSILON);
        let x = gelu(linear(x, leaves.get("mlp.fc1.weight"), leaves.get("mlp.fc1.bias")));
        let x = linear(x, leaves.get("mlp.fc2.weight"), leaves.get("mlp.fc2.bias"));
        self.scale(leaves, "ls2.gamma", x)
    }

    fn scale(&self, leaves: &Leaves<'_>, name: &str, x: Tensor<3>) -> Tensor<3> {
        match self.config.layer_scale {
            Some(_) => x * leaves.get::<1>(name).unsqueeze(),
            None => x,
        }
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

    fn forward(&self, leaves: &Leaves<'_>, groups: Vec<Tokens>, draws: &Draws) -> Vec<Tokens> {
        let block = |(group, tokens): (usize, Tokens)| {
            let grid = tokens.grid;
            let x = tokens.x;
            let x = x.clone() + draws.apply(self.attend(leaves, x), group, 0);
            let x = x.clone() + draws.apply(self.mlp(leaves, x), group, 1);
            Tokens { x, grid }
        };
        groups.into_iter().enumerate().map(block).collect()
    }

    fn drop_path(&self) -> f32 {
        self.drop_path
    }
}

/// The last layer norm. Reading only the class token saves normalising the others.
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

    fn forward(&self, leaves: &Leaves<'_>, groups: Vec<Tokens>, _: &Draws) -> Vec<Tokens> {
        let norm = |tokens: &Tokens| {
            let [b, _, d] = tokens.x.dims();
            let x = match self.readout {
                Readout::Class => tokens.x.clone().slice([0..b, 0..1, 0..d]),
                Readout::All => tokens.x.clone(),
            };
            tokens.with(layer_norm(x, leaves.get("weight"), leaves.get("bias"), NORM_EPSILON))
        };
        groups.iter().map(norm).collect()
    }
}
