//! Where the bytes of a shard come from, behind one trait. Files are read at offsets, by many threads
//! at once, through one handle per shard: that of the shard itself, or that of its copy in the cache.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::open::open_shard;
use crate::PipelineError;

/// Bytes of a shard, readable at any offset from any thread.
pub trait Store: Send + Sync {
    /// Fills `buffer` from `offset_bytes` on.
    ///
    /// # Errors
    /// [`PipelineError::Io`] with the shard's name.
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), PipelineError>;

    /// The shard's name, for messages and ledgers.
    fn name(&self) -> String;

    /// What the shard takes of a cache; `None` for one that is read where it stands.
    fn cache_use(&self) -> Option<CacheUse> {
        None
    }

    /// Has the shard fetched in the background, if it must be fetched at all.
    fn prefetch(self: Arc<Self>) {}
}

/// A shard's part of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheUse {
    /// Bytes of the shard.
    pub len_bytes: u64,
    /// Bytes that the cache may hold.
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
