//! Preprocessing of images for a network.

use augment::Transform;
use networks::Normalization;
use serde::{Deserialize, Serialize};

/// Preprocessing that is stored with weights: with any other, a network computes different features.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Preprocessing {
    /// Mean and standard deviation by which colors in 0..=1 are normalized.
    pub normalization: Normalization,
    /// Bicubic resize and center crop.
    #[serde(flatten)]
    pub transform: Transform,
}

impl Preprocessing {
    /// Returns DINO's preprocessing for images of `size_px`: a resize to 256 px for 224 px, and in proportion.
    pub fn of_size(size_px: u32, normalization: Normalization) -> Self {
        Self { normalization, transform: Transform::new(size_px) }
    }

    /// Checks sizes and colors.
    ///
    /// # Errors
    /// A message that says what is wrong.
    pub fn validate(&self) -> Result<(), String> {
        self.transform.validate()?;
        self.normalization.validate()
    }

    /// Ratio of the crop's side to the resized short side, timm's `crop_pct`.
    pub(crate) fn crop_share(&self) -> f64 {
        f64::from(self.transform.size_px) / f64::from(self.transform.resize_px.max(1))
    }
}
