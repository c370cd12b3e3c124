//! Residual networks (He et al. 2016), with the names and shapes of torchvision.
//!
//! ```text
//! stem      7×7/2, max pool 3×3/2; for small images 3×3 and no pooling
//! basic     3×3 - 3×3                    bottleneck   1×1 - 3×3 - 1×1, four times as wide
//! stages    4, of widths w, 2w, 4w, 8w; the first unit of every stage but the first halves the grid, in its 3×3
//! ```
//!
//! The feature of a view is the mean over the last grid.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::branch::{Branch, BranchPart};
use super::convolution::{Layer, Stem};
use super::{BackboneConfig, Levels, Readout, is_rgb, rgb_channels};
use crate::batch_norm::BatchNorm;
use crate::unit::Unit;

/// A residual network, as a recipe writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Side of the images that the network is made for, in pixels.
    pub image_px: usize,
    /// Number of layers: 10, 18 or 34 with basic blocks; 14, 26, 50, 101 or 152 with bottlenecks.
    pub depth: usize,
    /// Channels of the first stage.
    #[serde(default = "default_width")]
    pub width: usize,
    /// Kind of the first unit.
    #[serde(default)]
    pub stem: StemKind,
    /// Starts the gain of each branch's last normalization at zero, so that the branch starts as
    /// its skip connection.
    #[serde(default)]
    pub zero_init_residual: bool,
    /// Number of channels of an image; 3 by default. A recipe sets data.channels, which this
    /// follows.
    #[serde(default = "rgb_channels", skip_serializing_if = "is_rgb")]
    pub channels: usize,
}

/// Kind of the first unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StemKind {
    /// 7×7 with a stride of two, and pooling.
    #[default]
    Imagenet,
    /// 3×3: for images of 32 px.
    Small,
}

fn default_width() -> usize {
    64
}

/// Returns the number of branches of each stage, and whether they are bottlenecks.
fn stages(depth: usize) -> Option<([usize; 4], bool)> {
    Some(match depth {
        10 => ([1, 1, 1, 1], false),
        18 => ([2, 2, 2, 2], false),
        34 => ([3, 4, 6, 3], false),
        14 => ([1, 1, 1, 1], true),
        26 => ([2, 2, 2, 2], true),
        50 => ([3, 4, 6, 3], true),
        101 => ([3, 4, 23, 3], true),
        152 => ([3, 8, 36, 3], true),
        _ => return None,
    })
}

impl Config {
    /// Returns the number of branches of each stage, and whether they are bottlenecks.
    pub fn stages(&self) -> ([usize; 4], bool) {
        // Validation has checked the depth.
        stages(self.depth).expect("a depth that was checked")
    }

    fn stem(&self) -> Stem {
        let layer = match self.stem {
            StemKind::Imagenet => layer("conv1", "bn1", self.channels, self.width, 7, 2),
            StemKind::Small => layer("conv1", "bn1", self.channels, self.width, 3, 1),
        };
        Stem { name: ".stem", layer, pools: self.stem == StemKind::Imagenet }
    }

    /// Returns the number of channels after `stage`.
    fn output(&self, stage: usize) -> usize {
        let (_, has_bottlenecks) = self.stages();
        let expansion = if has_bottlenecks { 4 } else { 1 };
        (self.width << stage) * expansion
    }

    /// Creates branch `index` of `stage`, of `input` channels.
    fn branch(&self, stage: usize, index: usize, input: usize) -> Branch {
        let width = self.width << stage;
        let stride = if stage > 0 && index == 0 { 2 } else { 1 };
        let (_, bottleneck) = self.stages();
        let output = self.output(stage);
        let mut layers = if bottleneck {
            vec![
                layer("conv1", "bn1", input, width, 1, 1),
                layer("conv2", "bn2", width, width, 3, stride),
                layer("conv3", "bn3", width, output, 1, 1),
            ]
        } else {
            vec![layer("conv1", "bn1", input, width, 3, stride), layer("conv2", "bn2", width, output, 3, 1)]
        };
        if self.zero_init_residual
            && let Some(last) = layers.last_mut()
        {
            last.norm.gain = Some(0.0);
        }
        let changes_shape = stride > 1 || input != output;
        Branch {
            name: format!("layer{}.{index}", stage + 1),
            layers,
            excitation: None,
            shortcut: changes_shape.then(|| layer("downsample.0", "downsample.1", input, output, 1, stride)),
            pools: false,
        }
    }
}

fn layer(conv: &str, norm: &str, input: usize, output: usize, kernel: usize, stride: usize) -> Layer {
    Layer { conv: conv.into(), norm: BatchNorm::new(norm, output), input, kernel, stride, groups: 1 }
}

impl BackboneConfig for Config {
    fn validate(&self) -> Result<(), String> {
        if !(1..=65_536).contains(&self.image_px) || !(1..=4096).contains(&self.width) {
            return Err("model.image_px must lie in 1..=65536 and model.width in 1..=4096".into());
        }
        match stages(self.depth) {
            Some(_) => Ok(()),
            None => {
                Err(format!("model.depth {} is not one of 10, 14, 18, 26, 34, 50, 101 and 152", self.depth))
            }
        }
    }

    fn units(&self, readout: Readout) -> Vec<Box<dyn Unit>> {
        let (depths, _) = self.stages();
        let mut units: Vec<Box<dyn Unit>> = vec![Box::new(self.stem())];
        let mut input = self.width;
        for (stage, depth) in depths.into_iter().enumerate() {
            for index in 0..depth {
                let is_last = stage == 3 && index + 1 == depth;
                let pools = is_last && readout == Readout::Pooled;
                let branch = self.branch(stage, index, input);
                units.push(Box::new(BranchPart::undivided(Branch { pools, ..branch })));
                input = self.output(stage);
            }
        }
        units
    }

    fn levels(&self) -> Levels {
        let (depths, _) = self.stages();
        Levels::from_depths(&depths)
    }

    fn width(&self) -> usize {
        self.output(3)
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
        match self.stem {
            StemKind::Imagenet => 32,
            StemKind::Small => 8,
        }
    }

    fn image_px(&self) -> usize {
        self.image_px
    }

    #[cfg(feature = "testing")]
    fn examples() -> Vec<Self> {
        let basic = Self {
            image_px: 16,
            depth: 10,
            width: 8,
            stem: StemKind::Small,
            zero_init_residual: false,
            channels: rgb_channels(),
        };
        vec![basic.clone(), Self { depth: 14, width: 4, channels: 2, ..basic }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of parameters of torchvision's networks, without their classifiers.
    #[test]
    fn numbers_of_parameters_are_the_published_ones() {
        for (depth, numel) in [(18, 11_176_512), (34, 21_284_672), (50, 23_508_032)] {
            let text = format!("image_px = 224\ndepth = {depth}");
            let units = toml::from_str::<Config>(&text).unwrap().units(Readout::Pooled);
            let trained = units.iter().flat_map(|unit| unit.params()).filter(|param| param.role.is_trained());
            assert_eq!(trained.map(|param| param.numel()).sum::<usize>(), numel);
        }
    }
}
