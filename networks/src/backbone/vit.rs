//! The vision transformer (Dosovitskiy et al. 2021), as DINO, DINOv2 and timm build it: tokens of
//! patches, a class token and registers, blocks, and a norm. The formulas are in
//! [`crate::transformer`]'s files.
//!
//! Parameter names and shapes are timm's.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{BackboneConfig, Levels, Readout, is_default, is_rgb, rgb_channels};
use crate::draws::{CoordinateDraw, CoordinateRule, DropCount, DropRule};
use crate::interpolation::Resampling;
use crate::transformer::block::{Block, DropPathDepth, MlpKind, QkvBias};
use crate::transformer::embed::Embed;
use crate::transformer::initial_weights::{InitialWeights, Initialization};
use crate::transformer::norm::Norm;
use crate::transformer::pos_embed::{self, Positions};
use crate::transformer::position_table::PositionTable;
use crate::transformer::rope::{Rope, rotations};
use crate::unit::Unit;

/// Upper limit of every size: far above any network, and small enough for products of sizes.
const MAX_SIZE: usize = 65_536;

/// Upper limit of the number of blocks: a plan tries every number of blocks that keep their graphs.
const MAX_BLOCKS: usize = 1000;

/// A vision transformer, as a recipe writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
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
    /// Number of which the hidden channels of a gated MLP are a multiple: 8 by default, 64 in
    /// DINOv3's largest network.
    #[serde(default = "default_mlp_multiple")]
    pub mlp_multiple: usize,
    /// Whether there is a class token, from which a view is read: true by default. Without one, a
    /// view is read as the mean of its patches, as in I-JEPA.
    #[serde(default = "default_class_token", skip_serializing_if = "Clone::clone")]
    pub class_token: bool,
    /// Number of registers, additional tokens beside the class token (Darcet et al. 2024).
    #[serde(default, skip_serializing_if = "is_default")]
    pub registers: usize,
    /// Initial LayerScale; none if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_scale: Option<f32>,
    /// Drop-path rate of the last block.
    #[serde(default)]
    pub drop_path: f32,
    /// Drop-path rates of the earlier blocks.
    #[serde(default, skip_serializing_if = "is_default")]
    pub drop_path_depth: DropPathDepth,
    /// Number of views for which a branch is dropped: random, or the same in each step, as in
    /// DINOv2 and DINOv3.
    #[serde(default, skip_serializing_if = "is_default")]
    pub drop_path_count: DropCount,
    /// Positions: a trained table, fixed sines and cosines, or rotations of queries and keys.
    #[serde(default, skip_serializing_if = "is_default")]
    pub positions: Positions,
    /// Base of the periods of rotary positions; 100 by default.
    #[serde(default = "default_rope_base")]
    pub rope_base: f64,
    /// Largest random shift of rotary coordinates in training, in units of half an image; none by
    /// default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_shift: Option<f32>,
    /// Largest random factor of each axis's rotary coordinate in training; none by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_jitter: Option<f32>,
    /// Largest random factor of both rotary coordinates in training; none by default, 2 in DINOv3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_rescale: Option<f32>,
    /// Biases of queries, keys and values; all by default.
    #[serde(default, skip_serializing_if = "is_default")]
    pub qkv_bias: QkvBias,
    /// Offset added to the side of another grid before the position embedding is resampled: 0.1 in
    /// DINO's and DINOv2's code, which matters for weights that were trained with it.
    #[serde(default)]
    pub pos_offset: f64,
    /// Resamples the position embedding with antialiasing, as in timm and in DINOv2 with registers.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pos_antialias: bool,
    /// Epsilon that layer norms add to the variance.
    #[serde(default = "default_norm_epsilon")]
    pub norm_epsilon: f64,
    /// Gives the class token and registers of the smaller views a separate norm when training with
    /// masked patches, as in DINOv3's largest network. Weights exported for other programs do not
    /// have it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub local_class_norm: bool,
    /// Freezes the projection of patches at its initial weights, which stabilizes MoCo v3 (Chen,
    /// Xie and He 2021).
    #[serde(default, skip_serializing_if = "is_default")]
    pub freeze_patches: bool,
    /// Rule for the initial weights.
    #[serde(default, skip_serializing_if = "is_default")]
    pub initialization: Initialization,
    /// Standard deviation of the initial class token and registers: 1e-6 in DINOv2; if absent,
    /// `init_std`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_std: Option<f32>,
    /// Standard deviation of truncated normal initial weights. The usual 0.02 suits widths from 384
    /// on; narrow networks need about `1/√width`, or their branches start too small to matter.
    #[serde(default = "default_init_std")]
    pub init_std: f32,
    /// Number of channels of an image; 3 by default. A recipe sets data.channels, which this
    /// follows.
    #[serde(default = "rgb_channels", skip_serializing_if = "is_rgb")]
    pub channels: usize,
}

fn default_class_token() -> bool {
    true
}

fn default_norm_epsilon() -> f64 {
    1e-6
}

fn default_rope_base() -> f64 {
    100.0
}

fn default_mlp_multiple() -> usize {
    8
}

fn default_init_std() -> f32 {
    0.02
}

fn default_mlp_ratio() -> f64 {
    4.0
}

impl Config {
    /// Creates a transformer with these sizes, and defaults for all other settings.
    pub fn new(image_px: usize, patch_px: usize, width: usize, depth: usize, heads: usize) -> Self {
        Self {
            image_px,
            patch_px,
            width,
            depth,
            heads,
            mlp_ratio: default_mlp_ratio(),
            layer_scale: None,
            drop_path: 0.0,
            mlp: MlpKind::Gelu,
            mlp_multiple: default_mlp_multiple(),
            rope_base: default_rope_base(),
            rope_shift: None,
            rope_jitter: None,
            rope_rescale: None,
            qkv_bias: QkvBias::All,
            class_token: default_class_token(),
            registers: 0,
            positions: Positions::Learned,
            freeze_patches: false,
            initialization: Initialization::TruncNormal,
            init_std: default_init_std(),
            token_std: None,
            drop_path_depth: DropPathDepth::Linear,
            drop_path_count: DropCount::Random,
            pos_offset: 0.0,
            pos_antialias: false,
            norm_epsilon: default_norm_epsilon(),
            local_class_norm: false,
            channels: rgb_channels(),
        }
    }

    /// Returns the position embedding `[1, 1 + N, D]` for images of `px` pixels, resampled from
    /// `embedding` if needed; `[1, N, D]` without a class token.
    pub fn positions_for(&self, embedding: &[f32], px: usize) -> Vec<f32> {
        let grid = px / self.patch_px;
        let own_grid = self.image_px / self.patch_px;
        if grid == own_grid {
            return embedding.to_vec();
        }
        let n_before = usize::from(self.class_token);
        pos_embed::resample(embedding, self.width, n_before, own_grid, grid, self.resampling())
    }

    /// Returns cosines and sines of rotary positions, row-major `[N, D_h / 2]` each, for images of
    /// `px` pixels; `None` for other positions.
    pub fn rotations_for(&self, px: usize) -> Option<[Vec<f32>; 2]> {
        if self.positions != Positions::Rope {
            return None;
        }
        let grid = [px / self.patch_px; 2];
        let d_head = self.width / self.heads;
        let rotations = rotations(grid, d_head, self.rope_base, &CoordinateDraw::default());
        Some([rotations.cos, rotations.sin])
    }

    /// Creates the units, with a token for masked patches if `takes_masks`.
    fn units_with_masks(&self, readout: Readout, takes_masks: bool) -> Vec<Box<dyn Unit>> {
        let mut units: Vec<Box<dyn Unit>> = Vec::with_capacity(self.depth + 2);
        units.push(Box::new(Embed {
            n_channels: self.channels,
            patch_px: self.patch_px,
            width: self.width,
            has_class_token: self.class_token,
            n_registers: self.registers,
            initial_weights: self.initial_weights(),
            positions: self.positions,
            freezes_patches: self.freeze_patches,
            takes_masks,
            table: PositionTable::new(
                usize::from(self.class_token),
                self.image_px / self.patch_px,
                self.resampling(),
            ),
        }));
        let mut rope = None;
        if self.positions == Positions::Rope {
            let d_head = self.width / self.heads;
            rope = Some(Arc::new(Rope::new(self.rope_base, d_head, self.coordinate_rule())));
        }
        for i in 0..self.depth {
            units.push(Box::new(Block {
                name: format!("blocks.{i}"),
                part: None,
                width: self.width,
                heads: self.heads,
                hidden: self.hidden(),
                mlp: self.mlp,
                layer_scale: self.layer_scale,
                drop_rule: self.drop_rule(i),
                initial_weights: self.initial_weights(),
                epsilon: self.norm_epsilon,
                qkv_bias: self.qkv_bias,
                rope: rope.clone(),
            }));
        }
        units.push(Box::new(Norm {
            name: "norm".into(),
            width: self.width,
            readout,
            epsilon: self.norm_epsilon,
            has_local: self.local_class_norm && takes_masks,
        }));
        units
    }

    /// Checks the settings of rotary positions.
    fn validate_rope(&self) -> Result<(), String> {
        if self.positions == Positions::Rope && !(self.width / self.heads).is_multiple_of(4) {
            return Err(format!(
                "model.width {} divided by model.heads {} must be a multiple of 4 for model.positions = rope",
                self.width, self.heads
            ));
        }
        if !(1.0..=1e6).contains(&self.rope_base) || !(1..=MAX_SIZE).contains(&self.mlp_multiple) {
            return Err(format!(
                "model.rope_base must lie in 1..=1000000, and model.mlp_multiple in 1..={MAX_SIZE}"
            ));
        }
        self.coordinate_rule().validate()
    }

    /// Returns the rule by which coordinates are changed in training.
    fn coordinate_rule(&self) -> CoordinateRule {
        CoordinateRule { shift: self.rope_shift, jitter: self.rope_jitter, rescale: self.rope_rescale }
    }

    fn drop_rule(&self, block: usize) -> DropRule {
        let share = self.drop_path * self.drop_path_depth.share(block, self.depth);
        DropRule { share, count: self.drop_path_count }
    }

    fn initial_weights(&self) -> InitialWeights {
        InitialWeights { rule: self.initialization, std: self.init_std, token_std: self.token_std }
    }

    /// Returns how the position embedding is resampled for images of another size.
    pub fn resampling(&self) -> Resampling {
        Resampling { offset: self.pos_offset, antialias: self.pos_antialias }
    }

    /// Returns the channels of the hidden layer. A gated one has two thirds, in steps of eight, as
    /// in DINOv2, so that both kinds have as many parameters.
    pub fn hidden(&self) -> usize {
        let hidden = (self.mlp_ratio * self.width as f64) as usize;
        match self.mlp {
            MlpKind::Gelu => hidden,
            MlpKind::Swiglu => ((2.0 * hidden as f64 / 3.0) as usize).next_multiple_of(self.mlp_multiple),
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
            return Err(format!("model.{key} is {value} but must lie in 1..={MAX_SIZE}"));
        }
        if self.depth > MAX_BLOCKS {
            return Err(format!("model.depth is {} but must lie in 1..={MAX_BLOCKS}", self.depth));
        }
        if self.registers > MAX_SIZE || !(0.0..=MAX_SIZE as f64).contains(&self.mlp_ratio) {
            return Err(format!("model.registers and model.mlp_ratio must lie in 0..={MAX_SIZE}"));
        }
        if self.registers > 0 && !self.class_token {
            return Err("model.registers needs model.class_token = true".into());
        }
        if !(-1.0..=1.0).contains(&self.pos_offset) {
            return Err(format!("model.pos_offset {} must lie in -1..=1", self.pos_offset));
        }
        if self.layer_scale.is_some_and(|value| !(0.0..=1e3).contains(&value)) {
            return Err("model.layer_scale must lie in 0..=1000".into());
        }
        if !self.image_px.is_multiple_of(self.patch_px) {
            let image_px = self.image_px;
            let patch_px = self.patch_px;
            return Err(format!("model.image_px {image_px} is not divisible by model.patch_px {patch_px}"));
        }
        if !self.width.is_multiple_of(self.heads) {
            return Err(format!("model.width {} is not divisible by model.heads {}", self.width, self.heads));
        }
        if !(0.0..1.0).contains(&self.drop_path) {
            return Err(format!("model.drop_path {} must lie in 0..1", self.drop_path));
        }
        self.initial_weights().validate()?;
        if !(0.0..=1e-2).contains(&self.norm_epsilon) {
            return Err(format!("model.norm_epsilon {} must lie in 0..=0.01", self.norm_epsilon));
        }
        if self.positions == Positions::SinCos && !self.width.is_multiple_of(4) {
            return Err(format!(
                "model.width {} must be a multiple of 4 for model.positions = sin_cos",
                self.width
            ));
        }
        self.validate_rope()?;
        if self.hidden() == 0 {
            return Err(format!("model.mlp_ratio {} leaves no hidden channels", self.mlp_ratio));
        }
        Ok(())
    }

    fn units(&self, readout: Readout) -> Vec<Box<dyn Unit>> {
        self.units_with_masks(readout, false)
    }

    fn masked_units(&self, readout: Readout) -> Option<Vec<Box<dyn Unit>>> {
        Some(self.units_with_masks(readout, true))
    }

    fn has_class_token(&self) -> bool {
        self.class_token
    }

    fn setting_of_masks(&self) -> Option<&'static str> {
        self.local_class_norm.then_some("model.local_class_norm")
    }

    /// Returns every block as a level, read through the last norm.
    fn levels(&self) -> Levels {
        // The embedding comes first.
        Levels { units: (1..=self.depth).collect(), readout: Some(self.depth + 1) }
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
        self.patch_px
    }

    fn stride_px(&self) -> usize {
        self.patch_px
    }

    fn image_px(&self) -> usize {
        self.image_px
    }

    fn takes_adapters() -> bool {
        true
    }

    #[cfg(feature = "testing")]
    fn examples() -> Vec<Self> {
        let plain = Self { mlp_ratio: 2.0, init_std: 0.2, ..Self::new(16, 4, 12, 2, 2) };
        let full =
            Self { layer_scale: Some(0.5), drop_path: 0.3, pos_offset: 0.1, depth: 3, ..plain.clone() };
        let with_registers = Self {
            mlp: MlpKind::Swiglu,
            registers: 2,
            pos_antialias: true,
            token_std: Some(0.1),
            drop_path: 0.3,
            drop_path_depth: DropPathDepth::Uniform,
            drop_path_count: DropCount::Exact,
            ..plain.clone()
        };
        let fixed = Self {
            positions: Positions::SinCos,
            freeze_patches: true,
            initialization: Initialization::Xavier,
            qkv_bias: QkvBias::None,
            ..plain.clone()
        };
        let rotary = Self {
            positions: Positions::Rope,
            norm_epsilon: 1e-5,
            rope_shift: Some(0.1),
            rope_jitter: Some(1.2),
            rope_rescale: Some(2.0),
            qkv_bias: QkvBias::WithoutKeys,
            mlp: MlpKind::Swiglu,
            mlp_multiple: 12,
            layer_scale: Some(0.5),
            registers: 2,
            local_class_norm: true,
            heads: 3,
            channels: 4,
            ..plain.clone()
        };
        let without_class = Self { class_token: false, positions: Positions::SinCos, ..plain.clone() };
        vec![plain, full, with_registers, fixed, rotary, without_class]
    }
}

#[cfg(test)]
mod tests {
    use crate::backbone::ModelConfig;

    /// Numbers of parameters of the published networks, as timm builds them: its DINOv3 ones have
    /// no biases of queries, keys and values.
    #[test]
    fn numbers_of_parameters_are_the_published_ones() {
        let v1 = "image_px = 224\npatch_px = 16";
        let v2 = "image_px = 518\npatch_px = 14\nlayer_scale = 1e-5";
        let v3 = "image_px = 256\npatch_px = 16\nlayer_scale = 1e-5\npositions = 'rope'\nqkv_bias = \
            'none'\nregisters = 4";
        let gated = "mlp = 'swiglu'\nmlp_ratio";
        let published = [
            (192, 12, 3, v1.to_string(), 5_524_416),
            (384, 12, 6, v1.to_string(), 21_665_664),
            (768, 12, 12, v1.to_string(), 85_798_656),
            (384, 12, 6, v2.to_string(), 22_056_192),
            (768, 12, 12, v2.to_string(), 86_579_712),
            (1024, 24, 16, v2.to_string(), 304_367_616),
            // timm has no position for the class token of networks with registers.
            (1024, 24, 16, format!("{v2}\nregisters = 4"), 304_370_688 + 1024),
            (1536, 40, 24, format!("{v2}\n{gated} = 4.0"), 1_136_479_232),
            (384, 12, 6, v3.to_string(), 21_586_944),
            (384, 12, 6, format!("{v3}\n{gated} = 6.0"), 28_683_264),
            (768, 12, 12, v3.to_string(), 85_641_216),
            (1024, 24, 16, v3.to_string(), 303_079_424),
            (1280, 32, 20, format!("{v3}\n{gated} = 6.0"), 840_509_440),
            (4096, 40, 32, format!("{v3}\n{gated} = 3.0\nmlp_multiple = 64"), 6_716_030_976),
        ];
        for (width, depth, heads, more, n) in published {
            let text = format!("arch = 'vit'\nwidth = {width}\ndepth = {depth}\nheads = {heads}\n{more}");
            let model: ModelConfig = toml::from_str(&text).unwrap();
            assert_eq!(model.n_params(), n, "{text}");
        }
    }
}
