//! How images become what a network was trained on.

use networks::Normalization;
use serde::{Deserialize, Serialize};

/// Largest side of an image that a network sees.
const MAX_PX: u32 = 4096;

/// What travels with weights: without it, features are other ones.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Preprocessing {
    /// What colors in 0..=1 are normalized with.
    pub normalization: Normalization,
    /// Length of the short side after the resize, which is bicubic.
    pub resize_px: u32,
    /// Side of the square that is cut out of the middle.
    pub size_px: u32,
}

impl Preprocessing {
    /// DINO's for images of `size_px`: a resize to 256 for 224, and in proportion.
    pub fn of_size(size_px: u32, normalization: Normalization) -> Self {
        let resize_px = (f64::from(size_px) * 256.0 / 224.0).round() as u32;
        Self { normalization, resize_px, size_px }
    }

    /// Checks sizes and colors.
    ///
    /// # Errors
    /// What is wrong, in words.
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

    /// The square's side over the resized side, as timm writes it.
    pub(crate) fn crop_share(&self) -> f64 {
        f64::from(self.size_px) / f64::from(self.resize_px.max(1))
    }
}
