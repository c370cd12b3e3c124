//! The views of an image, as a recipe writes them: a preset of the literature, or view by view.

use augment::{BlurRule, CropSpec, MultiCrop};
use serde::{Deserialize, Serialize};

/// Views of an image: a preset, or a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PresetSizes {
    /// Side of the two global views in pixels.
    pub global_px: u32,
    /// Side of the local views in pixels.
    pub local_px: u32,
    /// Number of local views.
    pub n_local: usize,
    /// Smallest and largest area of a global view over that of the image; 0.4 and 1 by default.
    #[serde(default = "default_global_scale")]
    pub global_scale: [f64; 2],
    /// Smallest and largest area of a local view over that of the image; 0.05 and 0.4 by default.
    #[serde(default = "default_local_scale")]
    pub local_scale: [f64; 2],
}

fn default_global_scale() -> [f64; 2] {
    [0.4, 1.0]
}

fn default_local_scale() -> [f64; 2] {
    [0.05, 0.4]
}

/// Sizes and blur of DINOv2's views.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dinov2Views {
    /// Side of the two global views in pixels.
    pub global_px: u32,
    /// Side of the local views in pixels.
    pub local_px: u32,
    /// Number of local views.
    pub n_local: usize,
    /// Probabilities of blur: `released`, the default, has those of the released models, `paper` the paper's.
    #[serde(default = "default_blur")]
    pub blur: BlurRule,
}

fn default_blur() -> BlurRule {
    BlurRule::Released
}

/// Sizes of MoCo v3's views.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MocoV3Views {
    /// Side of both views in pixels.
    pub size_px: u32,
    /// Smallest and largest area of a view over that of the image: from 0.08, the default, for transformers, 0.2 for ResNet-50.
    #[serde(default = "default_moco_v3_scale")]
    pub scale: [f64; 2],
}

fn default_moco_v3_scale() -> [f64; 2] {
    [0.08, 1.0]
}

/// List of views.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CustomViews {
    /// Views in order; global views come first.
    pub crops: Vec<CropSpec>,
}

impl ViewsConfig {
    /// Converts the settings into a multi-crop.
    ///
    /// # Errors
    /// A message with the key and what is wrong with it.
    pub fn multicrop(&self) -> Result<MultiCrop, String> {
        let multicrop = match self {
            Self::Dino(s) => {
                apart(s.global_px, s.local_px, s.n_local)?;
                let mut views = MultiCrop::dino(s.global_px, s.local_px, s.n_local);
                for (i, crop) in views.crops.iter_mut().enumerate() {
                    crop.scale = if i < 2 { s.global_scale } else { s.local_scale };
                }
                views
            }
            Self::Dinov2(s) => {
                apart(s.global_px, s.local_px, s.n_local)?;
                MultiCrop::dinov2(s.global_px, s.local_px, s.n_local, s.blur)
            }
            Self::MocoV3(s) => MultiCrop::moco_v3(s.size_px, s.scale),
            Self::Custom(views) => MultiCrop { crops: views.crops.clone() },
        };
        multicrop.validate().map_err(|error| format!("views.{error}"))?;
        Ok(multicrop)
    }
}

#[cfg(test)]
impl From<MultiCrop> for ViewsConfig {
    fn from(views: MultiCrop) -> Self {
        Self::Custom(CustomViews { crops: views.crops })
    }
}

/// Checks that global and local views differ in size, by which they are told apart.
fn apart(global_px: u32, local_px: u32, n_local: usize) -> Result<(), String> {
    // Presets repeat one kind of view; too many views are refused where all kinds are checked.
    if global_px != local_px || n_local == 0 {
        return Ok(());
    }
    Err(format!(
        "views.local_px must differ from views.global_px, {global_px}: views are told apart by their size, and \
         targets come from all views of the global size"
    ))
}
