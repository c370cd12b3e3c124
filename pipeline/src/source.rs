//! Source of a shard: its location and its expected content.

use crate::url::ShardUrl;

/// Location of a shard, with the length and the checksum that a list states.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Location of the shard.
    pub url: ShardUrl,
    /// Length of the stored shard, in bytes.
    pub len_bytes: Option<u64>,
    /// MD5 of the bytes, as they are stored.
    pub md5: Option<String>,
}

impl Source {
    /// Returns whether the shard is an uncompressed tar on a local disk, which is read in place,
    /// not from the cache.
    pub fn is_read_in_place(&self) -> bool {
        matches!(self.url, ShardUrl::File(_)) && self.url.is_plain_tar()
    }
}
