//! Libraries that weights are exchanged with.

use std::str::FromStr;

use crate::named::by_name;

/// A library that weights are exchanged with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// DINO: `hubconf.py` of facebookresearch/dino, and its training checkpoints.
    Dino,
    /// DINOv2, with or without registers.
    Dinov2,
    /// DINOv3: `hubconf.py` of facebookresearch/dinov3.
    Dinov3,
    /// timm (pytorch-image-models).
    Timm,
    /// torchvision.
    Torchvision,
    /// transformers by Hugging Face.
    Transformers,
}

impl Library {
    /// All libraries.
    pub const ALL: [Self; 6] =
        [Self::Dino, Self::Dinov2, Self::Dinov3, Self::Timm, Self::Torchvision, Self::Transformers];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dino => "dino",
            Self::Dinov2 => "dinov2",
            Self::Dinov3 => "dinov3",
            Self::Timm => "timm",
            Self::Torchvision => "torchvision",
            Self::Transformers => "transformers",
        }
    }
}

impl FromStr for Library {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        by_name(&Self::ALL, Self::name, text)
    }
}
