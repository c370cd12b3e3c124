//! Contents of a file of features, whatever its format: rows and names of images.

use serde::Deserialize;
use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

use crate::features::mapped::Mapped;

/// Name of the checksum in the description of features.
pub(super) const CHECKSUM: &str = "checksum";

/// Name of an image and its class.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Deserialize)]
pub struct ImageName {
    /// The shard that holds the image, if it is in one.
    #[serde(default)]
    pub shard: Option<String>,
    /// Key of the image in its shard, or its path within a folder.
    #[serde(alias = "name")]
    pub key: String,
    /// Number of the class.
    #[serde(default)]
    pub label: Option<u32>,
    /// Name of the class.
    #[serde(default)]
    pub class: Option<String>,
}

/// Returns the checksum of `rows`, `[n, width]`, and of their images, as it is written into the
/// description of features.
pub(super) fn checksum(rows: &[f32], width: usize, images: &[ImageName]) -> Value {
    let mut hash = Xxh3::new();
    hash.update(&(width as u64).to_le_bytes());
    hash.update(bytemuck::cast_slice(rows));
    for image in images {
        hash.update(
            format!("{:?} {:?} {:?} {:?}\n", image.shard, image.key, image.label, image.class).as_bytes(),
        );
    }
    format!("{:016x}", hash.digest()).into()
}

/// Rows of a file, `[n, width]`: the width and the values.
pub(super) enum FileRows {
    /// Values in memory.
    Memory(usize, Vec<f32>),
    /// Values in a mapped file.
    File(usize, Mapped),
}
