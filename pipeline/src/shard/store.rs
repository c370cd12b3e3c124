//! Storage of the bytes of a shard, behind one trait. Files are read at offsets by many threads at
//! once: the shard itself, or its copy in the cache.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::handles;
use super::open::open_shard;
use crate::identity::FileStamp;
use crate::{PipelineError, hash};

/// Bytes of a shard, readable at any offset from any thread.
pub trait Store: Send + Sync {
    /// Fills `buffer` with the bytes from `offset_bytes` on.
    ///
    /// # Errors
    /// [`PipelineError::Io`] with the shard's name.
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), PipelineError>;

    /// Returns the name of the shard, for messages and ledgers.
    fn name(&self) -> String;

    /// Returns a hash of the bytes of the shard, which it reads for that; for images in single
    /// files, a hash of the stamps of the files.
    ///
    /// # Errors
    /// As [`Store::read_at`].
    fn content_hash(&self) -> Result<u64, PipelineError>;

    /// Returns the shard's share of the cache; `None` for a shard that is read in place.
    fn cache_use(&self) -> Option<CacheUse> {
        None
    }

    /// Returns the file that holds the byte at `offset_bytes`; `None` for a shard, which is one
    /// file for all samples.
    fn single_file(&self, _offset_bytes: u64) -> Option<&Path> {
        None
    }

    /// Starts fetching the shard in the background, if it has to be fetched.
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
    /// State of the file when the shard was opened.
    stamp: FileStamp,
    /// Number of the shard among the open files of the process.
    number: u64,
}

impl LocalStore {
    /// Opens the shard at `path`.
    ///
    /// # Errors
    /// Errors of [`open_shard`].
    pub(crate) fn open(path: &Path) -> Result<Self, PipelineError> {
        let file = open_shard(path)?;
        let metadata = file.metadata().map_err(|error| PipelineError::io("open", path, error))?;
        let number = handles::next_number();
        handles::keep(number, Arc::new(file));
        Ok(Self { path: path.to_path_buf(), stamp: FileStamp::from_metadata(&metadata), number })
    }

    /// Returns the state of the file when it was opened.
    pub(crate) fn stamp(&self) -> &FileStamp {
        &self.stamp
    }

    fn file(&self) -> Result<Arc<File>, PipelineError> {
        handles::file(self.number, &self.path, &self.stamp)
    }
}

impl Drop for LocalStore {
    fn drop(&mut self) {
        handles::close(self.number);
    }
}

impl Store for LocalStore {
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), PipelineError> {
        self.file()?
            .read_exact_at(buffer, offset_bytes)
            .map_err(|error| PipelineError::io("read", &self.path, error))
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn content_hash(&self) -> Result<u64, PipelineError> {
        let file = self.file()?;
        let hash = hash::xxh3_of_file(&file).map_err(|error| PipelineError::io("read", &self.path, error))?;
        let metadata = file.metadata().map_err(|error| PipelineError::io("read", &self.path, error))?;
        if !FileStamp::from_metadata(&metadata).has_bytes_of(&self.stamp) {
            let reason = "it is changing while being read".into();
            return Err(PipelineError::ShardMismatch { shard: self.name(), reason });
        }
        Ok(hash)
    }
}
