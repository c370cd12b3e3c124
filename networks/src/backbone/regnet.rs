//! RegNetY: residual networks whose widths come from a line (Radosavovic et al. 2020), with the
//! names and shapes of torchvision. SEER is trained on these (Goyal et al. 2021 and 2022).
//!
//! ```text
//! u_j = w₀ + wₐ j                         width of branch j on a line, j < d
//! w_j = 8 · round(w₀ · wₘ^s_j / 8)        s_j = round(log(u_j / w₀) / log wₘ): branches of equal width are a stage
//! branch   1×1 - 3×3 in groups of g channels - excitation - 1×1; the first of a stage halves the grid
//! ```
//!
//! Widths are then rounded to the nearest multiple of the group width, which is no larger than the
//! width; halves are rounded to even multiples. torchvision rounds halves up, and no width down by
//! more than a tenth, so that its 800 MF and 8 GF are wider than those of the paper and of timm;
//! the names here mean torchvision's. The excitation squeezes to a quarter of the branch's input
//! channels. The feature of a view is the mean over the last grid.

use std::fmt::{self, Formatter};

use schemars::JsonSchema;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::branch::{Branch, BranchPart};
use super::convolution::{Layer, Stem};
use super::excitation::Excitation;
use super::{BackboneConfig, Levels, Readout, is_rgb, rgb_channels};
use crate::batch_norm::BatchNorm;
use crate::unit::Unit;

/// Channels of the stem.
const STEM_WIDTH: usize = 32;

/// Ratio of the excitation's channels to those of the branch's input.
const SQUEEZE: f64 = 0.25;

/// Upper limit of the number of stages, each of which halves the grid.
const MAX_STAGES: usize = 8;

/// Upper limit of the number of channels.
const MAX_WIDTH: usize = 65_536;

/// Divisor of all widths before they are rounded to whole groups.
const WIDTH_MULTIPLE: f64 = 8.0;

/// A RegNetY, as a recipe writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Side of the images that the network is made for, in pixels.
    pub image_px: usize,
    /// Published size, or a custom design.
    pub size: Size,
    /// Number of channels of an image; 3 by default. A recipe sets data.channels, which this
    /// follows.
    #[serde(default = "rgb_channels", skip_serializing_if = "is_rgb")]
    pub channels: usize,
}

/// A size: the name of a published one, or a table with a design.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum Size {
    /// Size named after the multiply-adds of an image of 224 px, or after its parameters.
    Named(NamedSize),
    /// Size that is given by its line of widths.
    Design(Design),
}

/// Implemented by hand, so that an error names the misspelled name or key: serde's own for untagged
/// enums tries both and only says that neither fits.
impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Size;

            fn expecting(&self, f: &mut Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as \"800mf\", or a table with depth, w_0, w_a, w_m and group_width")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<Size, E> {
                NamedSize::deserialize(name.into_deserializer()).map(Size::Named)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Size, A::Error> {
                Design::deserialize(MapAccessDeserializer::new(map)).map(Size::Design)
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// The published sizes: from the paper, and from SEER.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[allow(missing_docs)]
pub enum NamedSize {
    #[serde(rename = "200mf")]
    Mf200,
    #[serde(rename = "400mf")]
    Mf400,
    #[serde(rename = "600mf")]
    Mf600,
    #[serde(rename = "800mf")]
    Mf800,
    #[serde(rename = "1_6gf")]
    Gf1_6,
    #[serde(rename = "3_2gf")]
    Gf3_2,
    #[serde(rename = "4gf")]
    Gf4,
    #[serde(rename = "6_4gf")]
    Gf6_4,
    #[serde(rename = "8gf")]
    Gf8,
    #[serde(rename = "12gf")]
    Gf12,
    #[serde(rename = "16gf")]
    Gf16,
    #[serde(rename = "32gf")]
    Gf32,
    #[serde(rename = "64gf")]
    Gf64,
    #[serde(rename = "128gf")]
    Gf128,
    #[serde(rename = "256gf")]
    Gf256,
    #[serde(rename = "10b")]
    B10,
}

/// A design: the line that widths come from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Design {
    /// Number of branches, d.
    pub depth: usize,
    /// Width at the beginning of the line, w₀.
    pub w_0: usize,
    /// Slope of the line, wₐ.
    pub w_a: f64,
    /// Factor between the widths of stages, wₘ.
    pub w_m: f64,
    /// Channels of a group, g.
    pub group_width: usize,
    /// Rounds halves of a group up, and no width down by more than a tenth, as torchvision does;
    /// otherwise halves become even multiples, as in the paper and in timm.
    #[serde(default)]
    pub keeps_width: bool,
}

impl NamedSize {
    /// All sizes, from the smallest.
    pub const ALL: [Self; 16] = [
        Self::Mf200,
        Self::Mf400,
        Self::Mf600,
        Self::Mf800,
        Self::Gf1_6,
        Self::Gf3_2,
        Self::Gf4,
        Self::Gf6_4,
        Self::Gf8,
        Self::Gf12,
        Self::Gf16,
        Self::Gf32,
        Self::Gf64,
        Self::Gf128,
        Self::Gf256,
        Self::B10,
    ];

    /// Returns the design of torchvision's network of this size.
    pub fn design(self) -> Design {
        let (depth, w_0, w_a, w_m, group_width) = match self {
            Self::Mf200 => (13, 24, 36.44, 2.49, 8),
            Self::Mf400 => (16, 48, 27.89, 2.09, 8),
            Self::Mf600 => (15, 48, 32.54, 2.32, 16),
            Self::Mf800 => (14, 56, 38.84, 2.4, 16),
            Self::Gf1_6 => (27, 48, 20.71, 2.65, 24),
            Self::Gf3_2 => (21, 80, 42.63, 2.66, 24),
            Self::Gf4 => (22, 96, 31.41, 2.24, 64),
            Self::Gf6_4 => (25, 112, 33.22, 2.27, 72),
            Self::Gf8 => (17, 192, 76.82, 2.19, 56),
            Self::Gf12 => (19, 168, 73.36, 2.37, 112),
            Self::Gf16 => (18, 200, 106.23, 2.48, 112),
            Self::Gf32 => (20, 232, 115.89, 2.53, 232),
            Self::Gf64 => (20, 352, 147.48, 2.4, 328),
            Self::Gf128 => (27, 456, 160.83, 2.52, 264),
            Self::Gf256 => (27, 640, 230.83, 2.53, 373),
            Self::B10 => (27, 1744, 620.83, 2.52, 1010),
        };
        // All others are the same by both rules.
        let keeps_width = matches!(self, Self::Mf800 | Self::Gf8);
        Design { depth, w_0, w_a, w_m, group_width, keeps_width }
    }
}

/// A stage of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stage {
    /// Channels.
    pub width: usize,
    /// Number of branches.
    pub depth: usize,
    /// Channels of a group.
    pub group_width: usize,
}

impl Design {
    /// Returns the width of branch `j`, before it is rounded to whole groups.
    fn branch_width(&self, j: usize) -> usize {
        let w_0 = self.w_0 as f64;
        let on_line = w_0 + self.w_a * j as f64;
        let step = ((on_line / w_0).ln() / self.w_m.ln()).round_ties_even();
        let width = (w_0 * self.w_m.powf(step) / WIDTH_MULTIPLE).round_ties_even() * WIDTH_MULTIPLE;
        // A design with any width above the limit is rejected.
        width.min(2.0 * MAX_WIDTH as f64) as usize
    }

    fn stages(&self) -> Vec<Stage> {
        let mut stages: Vec<Stage> = Vec::new();
        for j in 0..self.depth {
            let width = self.branch_width(j);
            match stages.last_mut() {
                Some(stage) if stage.width == width => stage.depth += 1,
                _ => stages.push(Stage { width, depth: 1, group_width: self.group_width }),
            }
        }
        for stage in &mut stages {
            stage.group_width = stage.group_width.min(stage.width);
            stage.width = round_to_groups(stage.width, stage.group_width, self.keeps_width);
        }
        stages
    }
}

/// Rounds `width` to a multiple of `group_width`, by torchvision's rule if `keeps_width` is set.
fn round_to_groups(width: usize, group_width: usize, keeps_width: bool) -> usize {
    if !keeps_width {
        let n_groups = (width as f64 / group_width as f64).round_ties_even();
        return (n_groups as usize).max(1) * group_width;
    }
    let nearest = ((width + group_width / 2) / group_width * group_width).max(group_width);
    if nearest * 10 < width * 9 { nearest + group_width } else { nearest }
}

impl Config {
    /// Returns the stages, from the first to the last.
    pub fn stages(&self) -> Vec<Stage> {
        match self.size {
            Size::Named(size) => size.design().stages(),
            Size::Design(design) => design.stages(),
        }
    }

    /// Creates branch `index` of stage `stage_index`, of `input` channels.
    fn branch(&self, stage_index: usize, index: usize, stage: Stage, input: usize) -> Branch {
        let Stage { width, group_width, .. } = stage;
        let stride = if index == 0 { 2 } else { 1 };
        let squeezed = (SQUEEZE * input as f64).round_ties_even() as usize;
        let shortcut = (index == 0).then(|| layer("proj", input, width, 1, stride, 1));
        let block = stage_index + 1;
        Branch {
            name: format!("trunk_output.block{block}.block{block}-{index}"),
            layers: vec![
                layer("f.a", input, width, 1, 1, 1),
                layer("f.b", width, width, 3, stride, width / group_width),
                layer("f.c", width, width, 1, 1, 1),
            ],
            excitation: Some(Excitation { name: "f.se".into(), width, squeezed }),
            shortcut,
            pools: false,
        }
    }
}

/// Creates the layer `name` of a branch.
fn layer(name: &str, input: usize, output: usize, kernel: usize, stride: usize, groups: usize) -> Layer {
    Layer {
        conv: format!("{name}.0"),
        norm: BatchNorm::new(format!("{name}.1"), output),
        input,
        kernel,
        stride,
        groups,
    }
}

impl BackboneConfig for Config {
    fn validate(&self) -> Result<(), String> {
        if !(1..=MAX_WIDTH).contains(&self.image_px) {
            return Err(format!("model.image_px must lie in 1..={MAX_WIDTH}"));
        }
        let Size::Design(Design { depth, w_0, w_a, w_m, group_width, .. }) = self.size else { return Ok(()) };
        let is_slope_valid = (0.0..=MAX_WIDTH as f64).contains(&w_a) && w_m > 1.0 && w_m.is_finite();
        let are_widths_valid =
            (1..=MAX_WIDTH).contains(&group_width) && (WIDTH_MULTIPLE as usize..=MAX_WIDTH).contains(&w_0);
        if !(1..=1000).contains(&depth) || !are_widths_valid || !is_slope_valid {
            return Err(
                "model.size: depth must lie in 1..=1000, group_width in 1..=65536, w_0 in 8..=65536, w_a \
                 in 0..=65536 and w_m must be more than 1"
                    .into(),
            );
        }
        let stages = self.stages();
        if stages.len() <= MAX_STAGES && stages.iter().all(|stage| stage.width <= MAX_WIDTH) {
            Ok(())
        } else {
            Err(format!(
                "model.size: this design has {} stages, the widest of {} channels; at most {MAX_STAGES} \
                 stages and {MAX_WIDTH} channels are allowed",
                stages.len(),
                stages.iter().map(|stage| stage.width).max().unwrap_or(0)
            ))
        }
    }

    fn units(&self, readout: Readout) -> Vec<Box<dyn Unit>> {
        let stages = self.stages();
        let stem = Layer {
            conv: "0".into(),
            norm: BatchNorm::new("1", STEM_WIDTH),
            input: self.channels,
            kernel: 3,
            stride: 2,
            groups: 1,
        };
        let mut units: Vec<Box<dyn Unit>> = vec![Box::new(Stem { name: "stem", layer: stem, pools: false })];
        let mut input = STEM_WIDTH;
        for (stage_index, stage) in stages.iter().enumerate() {
            for index in 0..stage.depth {
                let is_last = stage_index + 1 == stages.len() && index + 1 == stage.depth;
                let pools = is_last && readout == Readout::Pooled;
                let branch = self.branch(stage_index, index, *stage, input);
                units.push(Box::new(BranchPart::undivided(Branch { pools, ..branch })));
                input = stage.width;
            }
        }
        units
    }

    fn levels(&self) -> Levels {
        let depths: Vec<usize> = self.stages().iter().map(|stage| stage.depth).collect();
        Levels::from_depths(&depths)
    }

    fn width(&self) -> usize {
        self.stages().last().map_or(STEM_WIDTH, |stage| stage.width)
    }

    fn n_channels(&self) -> usize {
        self.channels
    }

    fn set_n_channels(&mut self, n_channels: usize) {
        self.channels = n_channels;
    }

    fn cell_px(&self) -> usize {
        1
    }

    fn stride_px(&self) -> usize {
        2 << self.stages().len()
    }

    fn image_px(&self) -> usize {
        self.image_px
    }

    #[cfg(feature = "testing")]
    fn examples() -> Vec<Self> {
        let design = Design { depth: 3, w_0: 8, w_a: 6.0, w_m: 2.0, group_width: 4, keeps_width: false };
        vec![Self { image_px: 16, size: Size::Design(design), channels: rgb_channels() }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Widths, and numbers of parameters without a classifier: those of the paper's code (pycls),
    /// of torchvision for 8 GF, and of VISSL for the largest, all counted there.
    #[test]
    fn widths_and_numbers_of_parameters_are_the_published_ones() {
        let published = [
            (NamedSize::Mf200, [24, 56, 152, 368], 2_793_996),
            (NamedSize::Mf400, [48, 104, 208, 440], 3_903_144),
            (NamedSize::Mf600, [48, 112, 256, 608], 5_446_160),
            (NamedSize::Mf800, [64, 144, 320, 784], 5_647_512),
            (NamedSize::Gf1_6, [48, 120, 336, 888], 10_313_430),
            (NamedSize::Gf3_2, [72, 216, 576, 1512], 17_923_338),
            (NamedSize::Gf4, [128, 192, 512, 1088], 19_557_656),
            (NamedSize::Gf6_4, [144, 288, 576, 1296], 29_286_252),
            (NamedSize::Gf8, [224, 448, 896, 2016], 37_364_472),
            (NamedSize::Gf12, [224, 448, 896, 2240], 49_581_544),
            (NamedSize::Gf16, [224, 448, 1232, 3024], 80_565_140),
            (NamedSize::Gf32, [232, 696, 1392, 3712], 141_333_770),
            (NamedSize::Gf64, [328, 984, 1968, 4920], 276_457_786),
            (NamedSize::Gf128, [528, 1056, 2904, 7392], 637_419_894),
            (NamedSize::Gf256, [746, 1492, 4103, 10_444], 1_272_156_138),
            (NamedSize::B10, [2020, 4040, 11_110, 28_280], 9_323_934_872),
        ];
        for (size, widths, numel) in published {
            let config = Config { image_px: 224, size: Size::Named(size), channels: rgb_channels() };
            let units = config.units(Readout::Pooled);
            let params = units.iter().flat_map(|unit| unit.params());
            let trained = params.filter(|param| param.role.is_trained());
            assert_eq!(trained.map(|param| param.numel()).sum::<usize>(), numel, "{size:?}");
            let stage_widths: Vec<usize> = config.stages().iter().map(|stage| stage.width).collect();
            assert_eq!(stage_widths, widths, "{size:?}");
        }
    }

    /// Widths of timm's `regnety_008` and `regnety_080`, beside its `regnety_008_tv` and
    /// `regnety_080_tv`.
    #[test]
    fn designs_of_the_paper_are_narrower_than_those_of_torchvision() {
        for (size, widths) in
            [(NamedSize::Mf800, [64, 128, 320, 768]), (NamedSize::Gf8, [168, 448, 896, 2016])]
        {
            let design = Design { keeps_width: false, ..size.design() };
            let stage_widths: Vec<usize> = design.stages().iter().map(|stage| stage.width).collect();
            assert_eq!(stage_widths, widths, "{size:?}");
        }
    }
}
