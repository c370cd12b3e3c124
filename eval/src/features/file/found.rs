//! Numbers and names as the formats give them.

use serde::Deserialize;

use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

use crate::features::mapped::Mapped;

/// Name of the checksum in the description of features.
pub(super) const CHECKSUM: &str = "checksum";

/// Name of an image, and its class.
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

/// Returns the checksum of `rows`, `[n, width]`, and of the images that they are of, as it stands
/// in the description of features.
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

/// Numbers of a file: their width, and where they are.
pub(super) enum Found {
    /// Numbers in memory, `[n, width]`.
    Memory(usize, Vec<f32>),
    /// Numbers in a mapped file, `[n, width]`.
    File(usize, Mapped),
}
