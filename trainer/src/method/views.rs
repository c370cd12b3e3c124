//! The views of an image, as a recipe writes them: a preset of the literature, or view by view.

use augment::{BlurRule, CropSpec, MultiCrop, SizeChoice, ViewMix};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Views of an image: a preset, or a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "preset", rename_all = "snake_case")]
pub enum ViewsConfig {
    /// DINO's views.
    Dino(PresetSizes),
    /// DINOv2's views.
    Dinov2(Dinov2Views),
    /// MoCo v3's views.
    MocoV3(MocoV3Views),
    /// Views as listed.
    Custom(CustomViews),
}

/// Sizes of the views of a preset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PresetSizes {
    /// Side of the two global views in pixels. With the preset `custom`, it is
    /// `views.crops.0.size_px`, the size of the first listed views.
    pub global_px: u32,
    /// Side of the local views in pixels.
    pub local_px: u32,
    /// Number of local views.
    pub n_local: usize,
    /// Smallest and largest area of a global view as a share of the image; 0.4 and 1 by default.
    #[serde(default = "default_global_scale")]
    pub global_scale: [f64; 2],
    /// Smallest and largest area of a local view as a share of the image; 0.05 and 0.4 by default.
    #[serde(default = "default_local_scale")]
    pub local_scale: [f64; 2],
    /// Sizes of the views by share of the batches, in place of `global_px` and `local_px`; none by
    /// default.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mix: Vec<SizeChoice>,
    /// Views of images that are not 8-bit RGB; absent for RGB. With it, even if it is empty, views
    /// have no operations that only RGB has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<ChannelViews>,
}

fn default_global_scale() -> [f64; 2] {
    [0.4, 1.0]
}

fn default_local_scale() -> [f64; 2] {
    [0.05, 0.4]
}

/// Sizes and blur of DINOv2's views.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Dinov2Views {
    /// Side of the two global views in pixels. With the preset `custom`, it is
    /// `views.crops.0.size_px`, the size of the first listed views.
    pub global_px: u32,
    /// Side of the local views in pixels.
    pub local_px: u32,
    /// Number of local views.
    pub n_local: usize,
    /// Probabilities of blur: `released`, the default, for those of the released models, `paper`
    /// for the paper's.
    #[serde(default = "default_blur")]
    pub blur: BlurRule,
    /// Probability of a flip; 0.5 by default, 0 in DINOv3's largest network.
    #[serde(default = "default_flip_p")]
    pub flip_p: f32,
    /// Side, in pixels, of undistorted copies of the global views, for DINOv3's Gram teacher; none
    /// by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gram_px: Option<u32>,
    /// Sizes of the views by share of the batches, in place of `global_px`, `local_px` and
    /// `gram_px`; none by default.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mix: Vec<SizeChoice>,
    /// Views of images that are not 8-bit RGB; absent for RGB. With it, even if it is empty, views
    /// have no operations that only RGB has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<ChannelViews>,
}

fn default_flip_p() -> f32 {
    0.5
}

fn default_blur() -> BlurRule {
    BlurRule::Released
}

/// Sizes of MoCo v3's views.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MocoV3Views {
    /// Side of both views in pixels.
    pub size_px: u32,
    /// Smallest and largest area of a view as a share of the image: from 0.08, the default, for
    /// transformers, 0.2 for ResNet-50.
    #[serde(default = "default_moco_v3_scale")]
    pub scale: [f64; 2],
    /// Views of images that are not 8-bit RGB; absent for RGB. With it, even if it is empty, views
    /// have no operations that only RGB has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<ChannelViews>,
}

fn default_moco_v3_scale() -> [f64; 2] {
    [0.08, 1.0]
}

/// Views of images of any channels: brightness and contrast change in each channel by a factor of
/// its own, and hue, saturation, gray and solarization are left out.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ChannelViews {
    /// Probability of a rotation by one, two or three quarters of a turn, for views that do not set
    /// their own; 0 by default.
    pub rotate_p: f32,
    /// Probability with which each channel is set to 0 (at least one always remains), for views
    /// that do not set their own; 0 by default.
    pub drop_p: f32,
}

/// List of views.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CustomViews {
    /// Views in order; global views come first. The presets `dino` and `dinov2` state what is
    /// listed here by `views.global_px`, `views.local_px` and `views.n_local`.
    pub crops: Vec<CropSpec>,
    /// Sizes of the views by share of the batches, in place of those of `crops`; none by default.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mix: Vec<SizeChoice>,
    /// Views of images that are not 8-bit RGB; absent for RGB. With it, even if it is empty, views
    /// have no operations that only RGB has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<ChannelViews>,
}

impl ViewsConfig {
    /// Returns the views of a batch, with the first choice of sizes if there are several.
    ///
    /// # Errors
    /// A message with the key and the reason.
    pub fn multicrop(&self) -> Result<MultiCrop, String> {
        self.view_mix().map(|mix| mix.first().clone())
    }

    /// Returns the side in pixels of undistorted repeats of the global views, if there are any.
    pub fn gram_px(&self) -> Option<u32> {
        match self {
            Self::Dinov2(views) => views.gram_px,
            Self::Dino(_) | Self::MocoV3(_) | Self::Custom(_) => None,
        }
    }

    /// Reduces views that are listed one by one to `size_px`, if they are larger, except those
    /// whose index in the list `is_kept` holds for; returns the indices of those that are reduced.
    pub fn limit_sizes(&mut self, size_px: u32, is_kept: impl Fn(usize) -> bool) -> Vec<usize> {
        let mut reduced = Vec::new();
        let Self::Custom(views) = self else { return reduced };
        for (index, crop) in views.crops.iter_mut().enumerate() {
            if crop.size_px > size_px && !is_kept(index) {
                crop.size_px = size_px;
                reduced.push(index);
            }
        }
        reduced
    }

    /// Removes all choices of sizes but the first, and returns whether there were several.
    pub fn keep_first_choice(&mut self) -> bool {
        match self {
            Self::Dino(PresetSizes { mix, .. })
            | Self::Dinov2(Dinov2Views { mix, .. })
            | Self::Custom(CustomViews { mix, .. }) => {
                let had_several = mix.len() > 1;
                mix.truncate(1);
                had_several
            }
            Self::MocoV3(_) => false,
        }
    }

    /// Returns the views of every batch.
    ///
    /// # Errors
    /// A message with the key and the reason.
    pub fn view_mix(&self) -> Result<ViewMix, String> {
        let choices = match self {
            Self::Dino(PresetSizes { mix, .. })
            | Self::Dinov2(Dinov2Views { mix, .. })
            | Self::Custom(CustomViews { mix, .. }) => mix.as_slice(),
            Self::MocoV3(_) => &[],
        };
        let mut views = self.to_multicrop()?;
        if let Some(ChannelViews { rotate_p, drop_p }) = self.channels() {
            views = views.into_multichannel(*rotate_p, *drop_p);
        }
        ViewMix::new(views, choices).map_err(|error| format!("views.{error}"))
    }

    /// Returns the settings for images that are not 8-bit RGB, if there are any.
    fn channels(&self) -> Option<&ChannelViews> {
        match self {
            Self::Dino(views) => views.channels.as_ref(),
            Self::Dinov2(views) => views.channels.as_ref(),
            Self::MocoV3(views) => views.channels.as_ref(),
            Self::Custom(views) => views.channels.as_ref(),
        }
    }

    /// Returns the key of the views of `size_px`, the first if there are several; `views` where
    /// sizes are mixed.
    pub(crate) fn size_key(&self, size_px: u32) -> String {
        let global_px;
        let local_px;
        match self {
            Self::Dino(views) if views.mix.is_empty() => {
                global_px = views.global_px;
                local_px = views.local_px;
            }
            Self::Dinov2(views) if views.mix.is_empty() => {
                global_px = views.global_px;
                local_px = views.local_px;
            }
            Self::MocoV3(_) => return "views.size_px".into(),
            Self::Custom(views) if views.mix.is_empty() => {
                let found = views.crops.iter().position(|crop| crop.size_px == size_px);
                return found.map_or("views".into(), |index| format!("views.crops.{index}.size_px"));
            }
            _ => return "views".into(),
        }
        if size_px == global_px {
            "views.global_px".into()
        } else if size_px == local_px {
            "views.local_px".into()
        } else {
            "views".into()
        }
    }

    /// Converts the settings into a multi-crop of the sizes that they state, without `mix` and
    /// `channels`.
    fn to_multicrop(&self) -> Result<MultiCrop, String> {
        Ok(match self {
            Self::Dino(s) => {
                check_sizes_differ(s.global_px, s.local_px, s.n_local)?;
                let mut views = MultiCrop::dino(s.global_px, s.local_px, s.n_local);
                for (i, crop) in views.crops.iter_mut().enumerate() {
                    crop.scale = if i < 2 { s.global_scale } else { s.local_scale };
                }
                views
            }
            Self::Dinov2(s) => {
                check_sizes_differ(s.global_px, s.local_px, s.n_local)?;
                let mut views = MultiCrop::dinov2(s.global_px, s.local_px, s.n_local, s.blur);
                for crop in &mut views.crops {
                    crop.flip_p = s.flip_p;
                }
                match s.gram_px {
                    Some(size_px) => views.with_undistorted([0, 1], size_px),
                    None => views,
                }
            }
            Self::MocoV3(s) => MultiCrop::moco_v3(s.size_px, s.scale),
            Self::Custom(views) => MultiCrop { crops: views.crops.clone() },
        })
    }
}

#[cfg(test)]
impl From<MultiCrop> for ViewsConfig {
    fn from(views: MultiCrop) -> Self {
        Self::Custom(CustomViews { crops: views.crops, mix: Vec::new(), channels: None })
    }
}

/// Checks that global and local views differ in size, by which they are distinguished.
fn check_sizes_differ(global_px: u32, local_px: u32, n_local: usize) -> Result<(), String> {
    // The number of views is checked elsewhere, for all kinds of views.
    if global_px != local_px || n_local == 0 {
        return Ok(());
    }
    Err(format!(
        "views.local_px must differ from views.global_px, {global_px}: views are told apart by their \
         size, and targets come from all views of the global size"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Views of 24, 96 and 96 px are limited to 32, and the last one is kept.
    #[test]
    fn views_are_limited_each_by_itself() {
        let mut crops = Vec::new();
        for size_px in [24, 96, 96] {
            crops.extend(MultiCrop::single(size_px).crops);
        }
        let mut views = ViewsConfig::Custom(CustomViews { crops, mix: Vec::new(), channels: None });
        assert_eq!(views.limit_sizes(32, |index| index == 2), [1]);
        let ViewsConfig::Custom(limited) = views else { panic!("views that are listed") };
        let sizes_px: Vec<u32> = limited.crops.iter().map(|crop| crop.size_px).collect();
        assert_eq!(sizes_px, [24, 32, 96]);
    }
}
