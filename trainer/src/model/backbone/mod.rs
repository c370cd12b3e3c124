//! Backbones: lists of units from patch vectors to normalised tokens.
//!
//! A new backbone is one file and one variant of [`ModelConfig`].

mod pos_embed;
pub mod vit;

pub use vit::VitConfig;

use serde::{Deserialize, Serialize};

use super::unit::Unit;

/// A backbone, as a recipe writes it under `[model]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "arch", rename_all = "snake_case")]
pub enum ModelConfig {
    /// Vision transformer.
    Vit(VitConfig),
}

/// Which tokens leave the backbone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readout {
    /// The class token alone, `[B·V, 1, D]`.
    Class,
    /// Class token and patch tokens, `[B·V, 1 + N, D]`.
    All,
}

impl ModelConfig {
    /// The units from patch vectors to tokens.
    pub fn units(&self, readout: Readout) -> Vec<Box<dyn Unit>> {
        match self {
            Self::Vit(config) => vit::units(config, readout),
        }
    }

    /// Checks what the units rely on.
    ///
    /// # Errors
    /// The key and what is wrong with it.
    pub fn validate(&self) -> Result<(), String> {
        match self {
            Self::Vit(config) => config.validate(),
        }
    }

    /// Channels of the tokens.
    pub fn width(&self) -> usize {
        match self {
            Self::Vit(config) => config.width,
        }
    }

    /// Side of a patch, of which every view's side is a multiple.
    pub fn patch_px(&self) -> usize {
        match self {
            Self::Vit(config) => config.patch_px,
        }
    }

    /// Side of the images that the backbone is made for.
    pub fn image_px(&self) -> usize {
        match self {
            Self::Vit(config) => config.image_px,
        }
    }
}
