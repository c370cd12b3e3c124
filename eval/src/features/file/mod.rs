//! Files of features that other programs read and write: NumPy, Parquet, safetensors.

mod contents;
mod format;
mod npy;
mod parquet;
mod read;
mod safetensors;
mod write;

pub use contents::ImageName;
pub use format::{Format, export_files};
pub use networks::safetensors::encode_file as encode_safetensors;
pub use read::{FeatureFile, read};
pub use write::write;
