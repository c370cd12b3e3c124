//! What other libraries call the parameters of a backbone.

pub(crate) mod convnet;
pub(crate) mod transformer;

use std::str::FromStr;

use crate::named::by_name;

/// A library whose weights can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// The code of DINO: `hubconf.py` of facebookresearch/dino, and its training checkpoints.
    Dino,
    /// The code of DINOv2, with registers or without.
    Dinov2,
    /// timm (pytorch-image-models).
    Timm,
    /// torchvision.
    Torchvision,
    /// transformers of Hugging Face.
    Transformers,
}

impl Library {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Dino, Self::Dinov2, Self::Timm, Self::Torchvision, Self::Transformers];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dino => "dino",
            Self::Dinov2 => "dinov2",
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
