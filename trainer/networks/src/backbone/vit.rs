//! The vision transformer (Dosovitskiy et al. 2021), as DINO, DINOv2 and timm build it: tokens of patches, a class
//! token and registers, blocks, and a norm. The formulas are in [`super::transformer`]'s files.
//!
//! Parameter names and shapes are timm's.

use serde::{Deserialize, Serialize};

use super::transformer::block::{Block, MlpKind};
use super::transformer::embed::Embed;
use super::transformer::initial_weights::{InitialWeights, Initialization};
use super::transformer::norm::Norm;
use super::transformer::pos_embed::{self, Positions, Resampling};
use super::{BackboneConfig, Levels, Readout};
use crate::unit::Unit;

/// Upper limit of every size: far above any network, and small enough for products of sizes.
const MAX_SIZE: usize = 65_536;

/// Upper limit of the number of blocks: a plan tries every number of blocks that keep their graphs.
const MAX_BLOCKS: usize = 1000;

/// A vision transformer, as a recipe writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Side of the images that the position embedding is made for, in pixels.
    pub image_px: usize,
    /// Side of a patch, in pixels.
    pub patch_px: usize,
    /// Channels of a token.
    pub width: usize,
    /// Number of blocks.
    pub depth: usize,
    /// Number of attention heads.
    pub heads: usize,
    /// Ratio of the MLP's hidden channels to `width`.
    #[serde(default = "default_mlp_ratio")]
    pub mlp_ratio: f64,
    /// Kind of the MLP's hidden layer.
    #[serde(default, skip_serializing_if = "is_default")]
    pub mlp: MlpKind,
    /// Number of registers, further tokens beside the class token (Darcet et al. 2024).
    #[serde(default, skip_serializing_if = "is_default")]
    pub registers: usize,
    /// Initial LayerScale; absent for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_scale: Option<f32>,
    /// Drop-path rate of the last block.
    #[serde(default)]
    pub drop_path: f32,
    /// Drop-path rates of the blocks before it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub drop_path_depth: DropPathDepth,
    /// Position embedding: a trained table, or fixed sines and cosines.
    #[serde(default, skip_serializing_if = "is_default")]
    pub positions: Positions,
    /// Offset added to the side of another grid before the position embedding is resampled: 0.1 in DINO's and
    /// DINOv2's code, which matters for weights that were trained with it.
    #[serde(default)]
    pub pos_offset: f64,
    /// Resamples the position embedding with antialiasing, as in timm and in DINOv2 with registers.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pos_antialias: bool,
    /// Number that layer norms add to the variance.
    #[serde(default = "default_norm_epsilon", skip_serializing_if = "is_default_norm_epsilon")]
    pub norm_epsilon: f64,
    /// Keeps the initial values of the projection of patches, which stabilizes MoCo v3 (Chen, Xie and He 2021).
    #[serde(default, skip_serializing_if = "is_default")]
    pub freeze_patches: bool,
    /// Rule for the initial weights.
    #[serde(default, skip_serializing_if = "is_default")]
    pub initialization: Initialization,
    /// Standard deviation of the initial class token and registers: 1e-6 in DINOv2; if absent, `init_std`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_std: Option<f32>,
    /// Standard deviation of truncated normal initial weights. The usual 0.02 suits widths from 384 on; narrow networks
    /// need about `1/√width`, or their branches start too small to matter.
    #[serde(default = "default_init_std")]
    pub init_std: f32,
}

/// Drop-path rates over the depth of a transformer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DropPathDepth {
    /// Growth from 0 in the first block: DINO.
    #[default]
    Linear,
    /// The same rate in all blocks: DINOv2.
    Uniform,
}

/// Returns the value of DINO and timm.
fn default_norm_epsilon() -> f64 {
    1e-6
}

fn is_default_norm_epsilon(epsilon: &f64) -> bool {
    *epsilon == default_norm_epsilon()
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn default_init_std() -> f32 {
    0.02
}

fn default_mlp_ratio() -> f64 {
    4.0
}

impl Config {
    /// Returns the number of cells along a side of the images that the position embedding is made for.
    fn grid(&self) -> usize {
        self.image_px / self.patch_px
    }

    /// Returns the position embedding `[1, 1 + N, D]` for images of `px` pixels, resampled from `embedding` if needed.
    pub fn positions_for(&self, embedding: &[f32], px: usize) -> Vec<f32> {
        let grid = px / self.patch_px;
        if grid == self.grid() {
            return embedding.to_vec();
        }
        let (class, patches) = embedding.split_at(self.width);
        let weights = pos_embed::matrix(self.grid(), [grid; 2], self.resampling());
        let mut out = class.to_vec();
        for row in weights.chunks_exact(self.grid() * self.grid()) {
            let start = out.len();
            out.resize(start + self.width, 0.0);
            for (weight, patch) in row.iter().zip(patches.chunks_exact(self.width)) {
                out[start..].iter_mut().zip(patch).for_each(|(sum, value)| *sum += weight * value);
            }
        }
        out
    }

    /// Creates the units, with a token for masked patches if `takes_masks`.
    fn with_masks(&self, readout: Readout, takes_masks: bool) -> Vec<Box<dyn Unit>> {
        let resampling = self.resampling();
        let sizes = [self.patch_px, self.width, self.grid(), self.registers];
        let initial_weights =
            InitialWeights { rule: self.initialization, std: self.init_std, token_std: self.token_std };
        let kinds = [self.freeze_patches, takes_masks];
        let embed = Embed::new(sizes, initial_weights, self.positions, kinds, resampling);
        let mut units: Vec<Box<dyn Unit>> = vec![Box::new(embed)];
        for i in 0..self.depth {
            let share = match self.drop_path_depth {
                DropPathDepth::Linear => i as f32 / (self.depth - 1).max(1) as f32,
                DropPathDepth::Uniform => 1.0,
            };
            units.push(Box::new(Block {
                name: format!("blocks.{i}"),
                width: self.width,
                heads: self.heads,
                hidden: self.hidden(),
                mlp: self.mlp,
                layer_scale: self.layer_scale,
                drop_path: self.drop_path * share,
                initial_weights,
                epsilon: self.norm_epsilon,
            }));
        }
        units.push(Box::new(Norm { width: self.width, readout, epsilon: self.norm_epsilon }));
        units
    }

    fn resampling(&self) -> Resampling {
        Resampling { offset: self.pos_offset, antialias: self.pos_antialias }
    }

    /// Returns the channels of the hidden layer. A gated one has two thirds, in steps of eight, as in DINOv2, so that
    /// both kinds have as many parameters.
    pub fn hidden(&self) -> usize {
        let hidden = (self.mlp_ratio * self.width as f64) as usize;
        match self.mlp {
            MlpKind::Gelu => hidden,
            MlpKind::Swiglu => ((2.0 * hidden as f64 / 3.0) as usize).next_multiple_of(8),
        }
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
        if let Some((key, value)) = sizes.iter().find(|(_, value)| !(1..=MAX_SIZE).contains(value)) {
            return Err(format!("model.{key} is {value} and must lie in 1..={MAX_SIZE}"));
        }
        if self.depth > MAX_BLOCKS {
            return Err(format!("model.depth is {} and must lie in 1..={MAX_BLOCKS}", self.depth));
        }
        if self.registers > MAX_SIZE || !(0.0..=MAX_SIZE as f64).contains(&self.mlp_ratio) {
            return Err(format!("model.registers and model.mlp_ratio must lie in 0..={MAX_SIZE}"));
        }
        if !(-1.0..=1.0).contains(&self.pos_offset) {
            return Err(format!("model.pos_offset {} must lie in -1..=1", self.pos_offset));
        }
        if self.layer_scale.is_some_and(|value| !(0.0..=1e3).contains(&value)) {
            return Err("model.layer_scale must lie in 0..=1000".into());
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
        for (key, std) in [("init_std", Some(self.init_std)), ("token_std", self.token_std)] {
            if let Some(std) = std.filter(|std| !(0.0..=1.0).contains(std)) {
                return Err(format!("model.{key} {std} must lie in 0..=1"));
            }
        }
        if !(0.0..=1e-2).contains(&self.norm_epsilon) {
            return Err(format!("model.norm_epsilon {} must lie in 0..=0.01", self.norm_epsilon));
        }
        if self.positions == Positions::SinCos && !self.width.is_multiple_of(4) {
            return Err(format!(
                "model.width {} must be a multiple of 4 for model.positions = sin_cos",
                self.width
            ));
        }
        if self.hidden() == 0 {
            return Err(format!("model.mlp_ratio {} leaves no hidden channel", self.mlp_ratio));
        }
        Ok(())
    }

    fn units(&self, readout: Readout) -> Vec<Box<dyn Unit>> {
        self.with_masks(readout, false)
    }

    fn masked_units(&self, readout: Readout) -> Option<Vec<Box<dyn Unit>>> {
        Some(self.with_masks(readout, true))
    }

    /// Returns every block as a level, read through the last norm.
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

    #[cfg(feature = "testing")]
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
            mlp: MlpKind::Gelu,
            registers: 0,
            positions: Positions::Learned,
            freeze_patches: false,
            initialization: Initialization::TruncNormal,
            init_std: 0.2,
            token_std: None,
            drop_path_depth: DropPathDepth::Linear,
            pos_offset: 0.0,
            pos_antialias: false,
            norm_epsilon: default_norm_epsilon(),
        };
        let full =
            Self { layer_scale: Some(0.5), drop_path: 0.3, pos_offset: 0.1, depth: 3, ..plain.clone() };
        let with_registers = Self {
            mlp: MlpKind::Swiglu,
            registers: 2,
            pos_antialias: true,
            token_std: Some(0.1),
            ..plain.clone()
        };
        let uniform = Self { drop_path: 0.3, drop_path_depth: DropPathDepth::Uniform, ..plain.clone() };
        let fixed = Self {
            positions: Positions::SinCos,
            freeze_patches: true,
            initialization: Initialization::Xavier,
            ..plain.clone()
        };
        vec![plain, full, with_registers, uniform, fixed]
    }
}
