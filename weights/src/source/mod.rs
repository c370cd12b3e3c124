//! Weights files on a disk: tensors by name, and the configurations in the same folder.

mod backbone_tensors;
pub(crate) mod config;
mod layouts;
mod license;
mod opened;
mod unsupported;

pub(crate) use backbone_tensors::BackboneTensors;
pub use opened::is_weights;
pub(crate) use opened::{CONFIGURATION_FILES, Source, WEIGHT_FILES};
pub(crate) use unsupported::unsupported;
