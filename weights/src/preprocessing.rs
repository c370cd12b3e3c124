//! Preprocessing of images for a network.

use networks::Normalization;
use serde::{Deserialize, Serialize};

/// Largest side of a network's input image.
const MAX_PX: u32 = 4096;

/// Preprocessing that is stored with weights: with any other, a network computes different features.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Preprocessing {
    /// Mean and standard deviation by which colors in 0..=1 are normalized.
    pub normalization: Normalization,
    /// Length of the short side after the bicubic resize.
    pub resize_px: u32,
    /// Side of the center crop.
    pub size_px: u32,
}

impl Preprocessing {
    /// Returns DINO's preprocessing for images of `size_px`: a resize to 256 px for 224 px, and in proportion.
    pub fn of_size(size_px: u32, normalization: Normalization) -> Self {
        let resize_px = (f64::from(size_px) * 256.0 / 224.0).round() as u32;
        Self { normalization, resize_px, size_px }
    }

    /// Checks sizes and colors.
    ///
    /// # Errors
    /// A message that says what is wrong.
    pub fn validate(&self) -> Result<(), String> {
        let Self { resize_px, size_px, .. } = *self;
        if !(1..=MAX_PX).contains(&size_px) || !(1..=2 * MAX_PX).contains(&resize_px) {
            return Err(format!(
                "images are resized to {resize_px} px and cut to {size_px} px, which must lie in 1..={} and 1..={MAX_PX}",
                2 * MAX_PX
            ));
        }
        self.normalization.validate()
    }

    /// Ratio of the crop's side to the resized short side, timm's `crop_pct`.
    pub(crate) fn crop_share(&self) -> f64 {
        f64::from(self.size_px) / f64::from(self.resize_px.max(1))
    }
}
