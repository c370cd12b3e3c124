//! How images become what a network was trained on.

use serde::{Deserialize, Serialize};
use trainer::Normalization;

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

    /// The square's side over the resized side, as timm writes it.
    pub(crate) fn crop_share(&self) -> f64 {
        f64::from(self.size_px) / f64::from(self.resize_px.max(1))
    }
}
