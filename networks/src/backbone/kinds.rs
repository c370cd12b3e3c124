//! Configurations of all backbones, for code that names them, such as conversions of other
//! libraries' weights.

pub use super::RGB_CHANNELS;
pub use super::convnext::Config as ConvnextConfig;
pub use super::registry::ModelConfig;
pub use super::regnet::{Config as RegnetConfig, Design, NamedSize, Size};
pub use super::resnet::{Config as ResnetConfig, StemKind};
#[cfg(feature = "testing")]
pub use super::toy::Config as ToyConfig;
pub use super::vit::Config as VitConfig;
pub use crate::transformer::block::{DropPathDepth, MlpKind, QkvBias};
pub use crate::transformer::initial_weights::Initialization;
pub use crate::transformer::pos_embed::Positions;
