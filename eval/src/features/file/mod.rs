//! Files of features that other programs read and write: NumPy, Parquet, safetensors.

mod format;
mod found;
mod npy;
mod parquet;
mod read;
mod safetensors;
mod write;

pub use format::{Format, files_of};
pub use found::ImageName;
pub use read::{FeatureFile, read};
pub use write::write;
