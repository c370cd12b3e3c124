//! Numbers and names as the formats give them.

use serde::Deserialize;

use crate::features::mapped::Mapped;

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

/// Numbers of a file: their width, and where they are.
pub(super) enum Found {
    /// Numbers in memory, `[n, width]`.
    Memory(usize, Vec<f32>),
    /// Numbers in a mapped file, `[n, width]`.
    File(usize, Mapped),
}
