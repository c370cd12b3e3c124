//! A shard before it is opened.

use crate::url::ShardUrl;

/// A shard as it was named, with what was promised of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Where it is.
    pub url: ShardUrl,
    /// Its length.
    pub len_bytes: Option<u64>,
    /// MD5 of its bytes, as they are stored.
    pub md5: Option<String>,
}

impl Source {
    /// Whether it is a tar on a disk of this machine, and not one that the cache holds.
    pub fn is_read_in_place(&self) -> bool {
        matches!(self.url, ShardUrl::File(_)) && !self.url.is_gzip()
    }
}
