//! Sources of the bytes of a shard, behind one trait. Files are read at offsets, by many threads at once, through one
//! handle per shard: on the shard itself, or on its copy in the cache.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::open::open_shard;
use crate::PipelineError;

/// Bytes of a shard, readable at any offset from any thread.
pub trait Store: Send + Sync {
    /// Fills `buffer` with the bytes from `offset_bytes` on.
    ///
    /// # Errors
    /// [`PipelineError::Io`] with the shard's name.
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), PipelineError>;

    /// Returns the name of the shard, for messages and ledgers.
    fn name(&self) -> String;

    /// Returns a hash of what tells the bytes from others of the same names and lengths, where the index has no checks; 0 if
    /// there is nothing of the kind.
    fn identity(&self) -> u64 {
        0
    }

    /// Returns the shard's share of the cache; `None` for a shard that is read in place.
    fn cache_use(&self) -> Option<CacheUse> {
        None
    }

    /// Starts fetching the shard in the background, if it must be fetched at all.
    fn prefetch(self: Arc<Self>) {}
}

/// A shard's share of the cache, and the limit of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheUse {
    /// Length of the shard, in bytes.
    pub len_bytes: u64,
    /// Limit of the cache, in bytes.
    pub max_bytes: u64,
}

/// A shard on a local disk.
#[derive(Debug)]
pub(crate) struct LocalStore {
    path: PathBuf,
    file: File,
}

impl LocalStore {
    /// Opens the shard at `path`.
    ///
    /// # Errors
    /// Errors of [`open_shard`].
    pub(crate) fn open(path: &Path) -> Result<Self, PipelineError> {
        Ok(Self { path: path.to_path_buf(), file: open_shard(path)? })
    }
}

impl Store for LocalStore {
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), PipelineError> {
        self.file
            .read_exact_at(buffer, offset_bytes)
            .map_err(|error| PipelineError::io("read", &self.path, error))
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }
}
