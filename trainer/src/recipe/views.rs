//! The views of an image, as a recipe writes them.

use augment::{BlurRule, CropSpec, MultiCrop};
use serde::{Deserialize, Serialize};

/// The multi-crop: a preset of the literature, or view by view.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "preset", rename_all = "snake_case")]
pub enum ViewsConfig {
    /// DINO's.
    Dino(PresetSizes),
    /// DINOv2's.
    Dinov2(Dinov2Views),
    /// As listed.
    Custom(CustomViews),
}

/// Sizes of a preset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PresetSizes {
    /// Side of the two global views.
    pub global_px: u32,
    /// Side of the local views.
    pub local_px: u32,
    /// Local views.
    pub n_local: usize,
}

/// Sizes of DINOv2's views, and its blur.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dinov2Views {
    /// Side of the two global views.
    pub global_px: u32,
    /// Side of the local views.
    pub local_px: u32,
    /// Local views.
    pub n_local: usize,
    /// Probabilities of blur: the paper's, or those of the released models.
    #[serde(default)]
    pub blur: BlurRule,
}

/// Views one by one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CustomViews {
    /// In order; those that the teacher sees come first.
    pub crops: Vec<CropSpec>,
}

impl ViewsConfig {
    /// The multi-crop that is meant.
    pub fn multicrop(&self) -> MultiCrop {
        match self {
            Self::Dino(s) => MultiCrop::dino(s.global_px, s.local_px, s.n_local),
            Self::Dinov2(s) => MultiCrop::dinov2(s.global_px, s.local_px, s.n_local, s.blur),
            Self::Custom(views) => MultiCrop { crops: views.crops.clone() },
        }
    }
}
