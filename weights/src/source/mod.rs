//! Files of weights as they are on a disk: tensors by name, and configurations beside them.

pub(crate) mod config;
mod found;
mod layouts;
mod opened;
mod unsupported;

pub(crate) use found::Found;
pub use opened::is_weights;
pub(crate) use opened::{CONFIGURATIONS, IN_FOLDERS, Source};
pub(crate) use unsupported::unsupported;
