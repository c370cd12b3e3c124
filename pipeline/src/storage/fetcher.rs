//! Fetching of whole shards into the cache and of small texts into memory.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crossbeam::channel::{Sender, unbounded};

use super::cache::{Cache, PartialShard};
use super::config::{ColumnNames, StorageConfig};
use super::name::cache_name;
use super::receive::stream_tar;
use crate::PipelineError;
use crate::remote::Client;
use crate::remote::body::Failure;
use crate::shard::sidecar;
use crate::source::Source;
use crate::url::ShardUrl;

/// Maximum size of a shard list or an index, in bytes.
const MAX_TEXT_BYTES: u64 = 1 << 28;

/// Advice to the user about an index that does not describe its shard.
const REINDEX_HINT: &str = "if it was replaced, rebuild the index with `ocelli shards index --overwrite`";

/// Fetches shards and texts. Shared by threads; clones are handles of the same fetcher.
#[derive(Clone)]
pub(super) struct Fetcher {
    inner: Arc<Inner>,
}

struct Inner {
    config: StorageConfig,
    cache: Cache,
    client: OnceLock<Result<Client, String>>,
    prefetcher: Mutex<Option<Sender<Job>>>,
}

/// Closure that brings a shard into the cache before it is needed.
type Job = Box<dyn FnOnce() + Send>;

impl Fetcher {
    /// Creates a fetcher. No file or server is accessed until it is needed.
    pub(super) fn new(config: StorageConfig) -> Self {
        let cache = Cache::new(config.cache_folder.clone(), config.cache_bytes, config.n_fetches);
        let inner = Inner { config, cache, client: OnceLock::new(), prefetcher: Mutex::default() };
        Self { inner: Arc::new(inner) }
    }

    /// Returns the cache of whole shards and indices.
    pub(super) fn cache(&self) -> &Cache {
        &self.inner.cache
    }

    /// Returns the name of a shard in the cache, and of its index.
    ///
    /// # Errors
    /// [`PipelineError::MissingShard`], [`PipelineError::Io`].
    pub(super) fn cache_name(&self, source: &Source) -> Result<String, PipelineError> {
        cache_name(source, &self.inner.config)
    }

    /// Returns the columns that the user has named.
    pub(super) fn columns(&self) -> &ColumnNames {
        &self.inner.config.columns
    }

    /// Returns the path of the cached index of a shard that has no sidecar.
    pub(super) fn cached_index_path(&self, source: &Source) -> Result<PathBuf, PipelineError> {
        Ok(sidecar::path_of(&self.inner.cache.path(&self.cache_name(source)?)))
    }

    /// Returns the cached file of a shard; fetches it if it is not in the cache. `expected` is the
    /// length in bytes and the checksum that its index states.
    pub(super) fn file(
        &self,
        source: &Source,
        name: &str,
        expected: Option<(u64, Option<u64>)>,
    ) -> Result<Arc<File>, PipelineError> {
        let expected_bytes = expected.map(|(expected_bytes, _)| expected_bytes);
        self.inner.cache.file(name, expected_bytes, |partial| match self.fetch(source, expected, partial) {
            Err(error @ PipelineError::ShardMismatch { .. }) => {
                tracing::warn!("{error}; fetching it again");
                self.fetch(source, expected, partial)
            }
            result => result,
        })
    }

    /// Fetches a shard into `partial`, and checks its length and checksum.
    fn fetch(
        &self,
        source: &Source,
        expected: Option<(u64, Option<u64>)>,
        partial: &mut PartialShard<'_>,
    ) -> Result<(), PipelineError> {
        stream_tar(source, || self.client(), &self.inner.config, partial)?;
        let Some((expected_bytes, expected_hash)) = expected else {
            // A compressed stream ends with a checksum, and a Parquet file with its directory.
            if !source.url.is_plain_tar() || partial.is_complete_tar() {
                return Ok(());
            }
            let reason =
                "it does not end like a tar, and its length is unknown: the download may be incomplete";
            return Err(PipelineError::Fetch { url: source.url.to_string(), reason: reason.into() });
        };
        let (len_bytes, hash) = partial.written();
        if expected_bytes != len_bytes {
            let reason =
                format!("it has {len_bytes} bytes, but its index says {expected_bytes}; {REINDEX_HINT}");
            return Err(PipelineError::ShardMismatch { shard: source.url.to_string(), reason });
        }
        if expected_hash.is_some_and(|expected| expected != hash) {
            let reason = format!("its checksum differs from that in its index; {REINDEX_HINT}");
            return Err(PipelineError::ShardMismatch { shard: source.url.to_string(), reason });
        }
        Ok(())
    }

    /// Closes a handle on a cached shard that failed.
    pub(super) fn close(&self, cache_name: &str, failed: &Arc<File>) {
        self.inner.cache.close(cache_name, failed);
    }

    /// Removes the cached index of a shard and the cached shard: the next run reads both again. A
    /// sidecar is kept.
    ///
    /// # Errors
    /// [`PipelineError::Io`].
    pub(super) fn forget(&self, source: &Source) -> Result<(), PipelineError> {
        let path = self.inner.cache.path(&self.cache_name(source)?);
        for path in [sidecar::path_of(&path), path] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(PipelineError::io("remove", &path, error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Runs `job`, which brings a shard into the cache, on a background thread, after the jobs that
    /// were queued before.
    pub(super) fn prefetch(&self, job: Job) {
        let mut prefetcher = self.inner.prefetcher.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = prefetcher.get_or_insert_with(|| {
            let (sender, jobs) = unbounded::<Job>();
            for _ in 0..self.inner.config.n_fetches.max(1) {
                let jobs = jobs.clone();
                std::thread::spawn(move || {
                    for job in jobs {
                        job();
                    }
                });
            }
            sender
        });
        // The threads end with the fetcher, which holds the sender.
        let _ = sender.send(job);
    }

    /// Reads a list or a sidecar into memory.
    pub(super) fn read_text(&self, url: &ShardUrl) -> Result<Vec<u8>, Failure> {
        match url {
            ShardUrl::File(path) => fs::read(path).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => Failure::NotFound,
                _ => Failure::Sink(error),
            }),
            ShardUrl::Remote(url) => self.client()?.read(url, MAX_TEXT_BYTES),
            ShardUrl::Pipe(_) => Err(Failure::NotFound),
        }
    }

    fn client(&self) -> Result<&Client, Failure> {
        let config = &self.inner.config;
        let client = self.inner.client.get_or_init(|| {
            Client::new(config.options.clone(), config.retry.clone()).map_err(|error| error.to_string())
        });
        client.as_ref().map_err(|reason| Failure::Permanent(reason.clone()))
    }
}
