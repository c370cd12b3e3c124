//! The views of an image, as a recipe writes them: a preset of the literature, or view by view.

use augment::{BlurRule, CropSpec, MultiCrop};
use serde::{Deserialize, Serialize};

/// The multi-crop.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "preset", rename_all = "snake_case")]
pub enum ViewsConfig {
    /// DINO's.
    Dino(PresetSizes),
    /// DINOv2's.
    Dinov2(Dinov2Views),
    /// MoCo v3's.
    MocoV3(MocoV3Views),
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
    /// Area of a global view over that of the image, at least and at most.
    #[serde(default = "default_global_scale")]
    pub global_scale: [f64; 2],
    /// Area of a local view over that of the image.
    #[serde(default = "default_local_scale")]
    pub local_scale: [f64; 2],
}

fn default_global_scale() -> [f64; 2] {
    [0.4, 1.0]
}

fn default_local_scale() -> [f64; 2] {
    [0.05, 0.4]
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
    /// Probabilities of blur: those that the released models saw, or the paper's.
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
    /// Side of both views.
    pub size_px: u32,
    /// Area of a view over that of the image, at least and at most: from 0.08 for transformers, from 0.2 for ResNet-50.
    #[serde(default = "default_moco_v3_scale")]
    pub scale: [f64; 2],
}

fn default_moco_v3_scale() -> [f64; 2] {
    [0.08, 1.0]
}

/// Views one by one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CustomViews {
    /// In order; global views come first.
    pub crops: Vec<CropSpec>,
}

impl ViewsConfig {
    /// The multi-crop that is meant.
    ///
    /// # Errors
    /// The key and what is wrong with it.
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

/// Views are told apart by their size.
fn apart(global_px: u32, local_px: u32, n_local: usize) -> Result<(), String> {
    // The presets repeat one kind of view; what is too many is said where all kinds are checked.
    if global_px != local_px || n_local == 0 {
        return Ok(());
    }
    Err(format!(
        "views.local_px must differ from views.global_px, {global_px}: views are told apart by their size, and the \
         teacher sees all views of the global size"
    ))
}
