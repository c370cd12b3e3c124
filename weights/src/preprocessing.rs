//! Preprocessing of images for a network.

use augment::{Decoding, Transform};
use networks::Pixels;
use serde::{Deserialize, Serialize};

/// Preprocessing that is stored with weights, because a network computes different features with
/// any other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Preprocessing {
    /// Pixels that the network takes, with the constants that normalize them.
    #[serde(flatten)]
    pub pixels: Pixels,
    /// Bicubic resizing and center crop.
    #[serde(flatten)]
    pub transform: Transform,
    /// Choices in decoding; the usual ones for weights that other programs have written.
    #[serde(flatten)]
    pub decoding: Decoding,
}

impl Preprocessing {
    /// Creates DINO's preprocessing for images of `size_px`. Images are resized to 256 px for crops
    /// of 224 px, and in proportion for other sizes.
    pub fn with_size(size_px: u32, pixels: impl Into<Pixels>) -> Self {
        Self::new(pixels.into(), Transform::new(size_px))
    }

    /// Creates the preprocessing with the default decoding.
    pub fn new(pixels: Pixels, transform: Transform) -> Self {
        Self { pixels, transform, decoding: Decoding::default() }
    }

    /// Checks sizes and colors.
    ///
    /// # Errors
    /// A message that says what is wrong.
    pub fn validate(&self) -> Result<(), String> {
        self.transform.validate()?;
        if let Some(bits) = self.decoding.bits_used.filter(|bits| !(1..16).contains(bits)) {
            return Err(format!("bits_used is {bits}, but must be 1 to 15"));
        }
        self.pixels.normalization.validate()
    }

    /// Ratio of the crop's side to the resized short side, timm's `crop_pct`.
    pub(crate) fn crop_ratio(&self) -> f64 {
        f64::from(self.transform.size_px) / f64::from(self.transform.resize_px.max(1))
    }
}
