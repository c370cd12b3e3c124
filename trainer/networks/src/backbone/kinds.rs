//! The configurations of all backbones, for those who know them by name, such as other libraries' weights.

pub use super::registry::ModelConfig;
pub use super::regnet::{Config as RegnetConfig, NamedSize, Size};
pub use super::resnet::{Config as ResnetConfig, StemKind};
pub use super::transformer::beginning::Initialization;
pub use super::transformer::block::MlpKind;
pub use super::transformer::pos_embed::Positions;
pub use super::vit::Config as VitConfig;
