//! Where the bytes of a shard come from, behind one trait. Files are read at offsets, by many threads
//! at once, through one handle per shard: that of the shard itself, or that of its copy in the cache.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::PipelineError;
use crate::storage::{Source, Storage};

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
pub struct LocalStore {
    path: PathBuf,
    file: File,
}

impl LocalStore {
    /// Opens the shard at `path`.
    ///
    /// # Errors
    /// [`PipelineError::MissingShard`] or [`PipelineError::Io`].
    pub fn open(path: &Path) -> Result<Self, PipelineError> {
        match File::open(path) {
            Ok(file) => Ok(Self { path: path.to_path_buf(), file }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Err(PipelineError::MissingShard { path: path.to_path_buf() })
            }
            Err(error) => Err(PipelineError::io("open", path, error)),
        }
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

/// Threads that wait for a shard together do not each try again what has just failed.
const FAILURE_LASTS: Duration = Duration::from_secs(10);

/// A shard that is read from the cache, and fetched when it is not there.
pub(crate) struct CachedStore {
    pub(crate) storage: Storage,
    pub(crate) source: Source,
    /// Its name in the cache.
    pub(crate) cache_name: String,
    /// What its index says of it.
    pub(crate) len_bytes: u64,
    pub(crate) checksum: Option<u64>,
    /// When it last did not come, and why. Locked while it is fetched, so that others who want it wait.
    pub(crate) failure: Mutex<Option<(Instant, String)>>,
}

impl CachedStore {
    /// The file in the cache.
    pub(crate) fn file(&self) -> Result<Arc<File>, PipelineError> {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, reason)) = failure.take_if(|(at, _)| at.elapsed() < FAILURE_LASTS) {
            let (url, at) = (self.name(), Instant::now());
            *failure = Some((at, reason.clone()));
            return Err(PipelineError::Fetch { url, reason: format!("a moment ago: {reason}") });
        }
        let expected = Some((self.len_bytes, self.checksum));
        self.storage.file(&self.source, &self.cache_name, expected).inspect_err(|error| {
            *failure = Some((Instant::now(), error.to_string()));
        })
    }
}

impl Store for CachedStore {
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), PipelineError> {
        let file = self.file()?;
        if file.read_exact_at(buffer, offset_bytes).is_ok() {
            return Ok(());
        }
        // On a network file system another machine may have removed what is open here.
        self.storage.close(&self.cache_name, &file);
        self.file()?
            .read_exact_at(buffer, offset_bytes)
            .map_err(|error| PipelineError::io("read the cached copy of", self.name().as_ref(), error))
    }

    fn name(&self) -> String {
        self.source.url.to_string()
    }

    fn cache_use(&self) -> Option<CacheUse> {
        Some(CacheUse { len_bytes: self.len_bytes, max_bytes: self.storage.cache_bytes() })
    }

    fn prefetch(self: Arc<Self>) {
        self.storage.clone().prefetch(self);
    }
}
