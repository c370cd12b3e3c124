//! A shard that is read from the cache.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::fetcher::Fetcher;
use crate::shard::store::{CacheUse, Store};
use crate::source::Source;
use crate::{PipelineError, hash};

/// Time for which the error of a failed fetch is returned without a new fetch, so that threads that
/// wait for a shard do not each retry.
const FAILURE_LIFETIME: Duration = Duration::from_secs(10);

/// A shard that is read from the cache, and fetched if it is not in the cache.
pub(super) struct CachedStore {
    pub(super) fetcher: Fetcher,
    pub(super) source: Source,
    /// Name of the shard in the cache.
    pub(super) cache_name: String,
    /// Length of the shard in bytes, which its index states along with the checksum.
    pub(super) len_bytes: u64,
    pub(super) checksum: Option<u64>,
    /// Time and reason of the last failed fetch. Locked during a fetch, so that other threads that
    /// need the shard wait.
    pub(super) failure: Mutex<Option<(Instant, String)>>,
}

impl CachedStore {
    /// Returns the file in the cache; fetches it if it is not in the cache.
    pub(super) fn file(&self) -> Result<Arc<File>, PipelineError> {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, reason)) = failure.take_if(|(at, _)| at.elapsed() < FAILURE_LIFETIME) {
            *failure = Some((Instant::now(), reason.clone()));
            let reason = format!("failed a moment ago: {reason}");
            return Err(PipelineError::Fetch { url: self.name(), reason });
        }
        let expected = Some((self.len_bytes, self.checksum));
        self.fetcher.file(&self.source, &self.cache_name, expected).inspect_err(|error| {
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
        // On a network file system another machine may have removed the open file.
        self.fetcher.close(&self.cache_name, &file);
        self.file()?
            .read_exact_at(buffer, offset_bytes)
            .map_err(|error| PipelineError::io("read the cached copy of", self.name().as_ref(), error))
    }

    fn name(&self) -> String {
        self.source.url.to_string()
    }

    fn content_hash(&self) -> Result<u64, PipelineError> {
        let file = self.file()?;
        hash::xxh3_of_file(&file)
            .map_err(|error| PipelineError::io("read the cached copy of", self.name().as_ref(), error))
    }

    fn cache_use(&self) -> Option<CacheUse> {
        Some(CacheUse { len_bytes: self.len_bytes, max_bytes: self.fetcher.cache().max_bytes() })
    }

    fn prefetch(self: Arc<Self>) {
        let fetcher = self.fetcher.clone();
        fetcher.prefetch(Box::new(move || {
            // The thread that needs the shard tries again, and reports the error.
            let _ = self.file();
        }));
    }
}
