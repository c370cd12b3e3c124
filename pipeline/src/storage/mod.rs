//! Opening of the shards that a user names, local or remote.
//!
//! A tar on a local disk is read in place. Every other shard (from a server, an object store or a
//! command, or a compressed one) is read from the [cache], which fetches it as a whole when it is
//! first needed. A shuffle reads all of a shard anyway, and a request for each sample would cost a
//! round trip and a fee.

mod cache;
mod cached;
mod config;
mod fetcher;
mod index;
mod name;
mod parquet;
mod part;
mod receive;
mod verify;
mod wids;

pub use config::{ColumnNames, StorageConfig};

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cached::CachedStore;
use fetcher::Fetcher;
use index::{cached_index, open_local};
use receive::fetch_error;

use crate::shard::Shard;
use crate::shard::sidecar;
use crate::source::Source;
use crate::url::ShardUrl;
use crate::{PipelineError, url};

/// Number of shards that are opened at a time: opening mostly waits for disks and servers.
const N_OPEN_THREADS: usize = 16;

/// Results of opening shards, by their index; `None` for those that were not opened.
type OpenResults = Mutex<Vec<Option<Result<Shard, PipelineError>>>>;

/// Opens shards. Shared by threads; clones are handles of the same storage.
#[derive(Clone)]
pub struct Storage {
    fetcher: Fetcher,
    /// Whether a warning has said that the named columns are not used.
    has_warned_of_columns: Arc<AtomicBool>,
}

impl Storage {
    /// Creates a storage. No file or server is accessed until it is needed.
    pub fn new(config: StorageConfig) -> Self {
        Self { fetcher: Fetcher::new(config), has_warned_of_columns: Arc::default() }
    }

    /// Returns the columns of lists and of Parquet files that the user has named.
    pub fn columns(&self) -> &ColumnNames {
        self.fetcher.columns()
    }

    /// Warns that the columns that the user has named, if any, are not looked for in `images`:
    /// tars, or a folder. Warns once.
    pub fn warn_unused_columns(&self, images: &str) {
        let columns = self.columns();
        if columns.is_any_named() && !self.has_warned_of_columns.swap(true, Ordering::Relaxed) {
            columns.warn_unused(images);
        }
    }

    /// Returns the shards that `specs` name ([`url::expand`]); a `wids` list is replaced by its
    /// shards.
    ///
    /// # Errors
    /// As [`url::expand`], and errors of fetching or parsing a list.
    pub fn sources(&self, specs: &[String]) -> Result<Vec<Source>, PipelineError> {
        let mut sources = Vec::new();
        for url in url::expand(specs)? {
            if url.is_list() {
                sources.extend(wids::shards(&url, &|list: &ShardUrl| {
                    self.fetcher.read_text(list).map_err(|failure| fetch_error(list, failure))
                })?)
            } else {
                sources.push(Source { url, len_bytes: None, md5: None })
            }
        }
        if sources.is_empty() {
            return Err(url::invalid_list(&specs.join(" "), "its lists name no shards".into()));
        }
        Ok(sources)
    }

    /// Opens a shard. Only its index is read, if it has one.
    ///
    /// # Errors
    /// As [`Shard::open`] for a tar on a disk; for others
    /// [`PipelineError::Fetch`], [`PipelineError::ShardMismatch`], and those of the cache.
    pub fn open(&self, source: &Source) -> Result<Shard, PipelineError> {
        let shard = match &source.url {
            ShardUrl::File(path) if source.is_read_in_place() => open_local(&self.fetcher, source, path)?,
            _ => self.open_cached(source)?,
        };
        // A list states the length of the compressed bytes, which are not kept.
        let stated_bytes = source.len_bytes.filter(|_| source.url.is_plain_tar());
        let actual_bytes = shard.index().shard_bytes;
        match stated_bytes {
            Some(stated_bytes) if stated_bytes != actual_bytes => {
                let reason = format!("its list says {stated_bytes} bytes, but it has {actual_bytes}");
                Err(PipelineError::ShardMismatch { shard: source.url.to_string(), reason })
            }
            _ => Ok(shard),
        }
    }

    fn open_cached(&self, source: &Source) -> Result<Shard, PipelineError> {
        let name = self.fetcher.cache_name(source)?;
        let index = cached_index(&self.fetcher, source, &name)?;
        let store = CachedStore {
            fetcher: self.fetcher.clone(),
            source: source.clone(),
            cache_name: name,
            len_bytes: index.shard_bytes,
            checksum: index.checksum,
            failure: Mutex::default(),
        };
        Ok(Shard::with_current_index(Arc::new(store), index))
    }

    /// Opens shards on several threads; the result is in the order of `sources`.
    ///
    /// # Errors
    /// As [`Storage::open`]: the error of the first shard that failed.
    pub fn open_all(&self, sources: &[Source]) -> Result<Vec<Shard>, PipelineError> {
        if let Some(source) = sources.iter().find(|source| !source.url.is_parquet()) {
            self.warn_unused_columns(&source.url.to_string());
        }
        let next = AtomicUsize::new(0);
        let results: OpenResults = Mutex::new(sources.iter().map(|_| None).collect());
        std::thread::scope(|scope| {
            for _ in 0..N_OPEN_THREADS.min(sources.len()) {
                scope.spawn(|| self.open_remaining(sources, &next, &results));
            }
        });
        results.into_inner().unwrap_or_else(PoisonError::into_inner).into_iter().flatten().collect()
    }

    /// Opens the shards of `sources` from index `next` on, which it increments, and stores each in
    /// `results` under its index. Several threads do so at the same time.
    fn open_remaining(&self, sources: &[Source], next: &AtomicUsize, results: &OpenResults) {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(source) = sources.get(i) else { return };
            let result = self.open(source);
            if result.is_err() {
                // The remaining shards are not needed.
                next.store(sources.len(), Ordering::Relaxed);
            }
            results.lock().unwrap_or_else(PoisonError::into_inner)[i] = Some(result);
        }
    }

    /// Returns whether the cache holds the index of a shard.
    ///
    /// # Errors
    /// [`PipelineError::MissingShard`], [`PipelineError::Io`].
    pub fn has_index(&self, source: &Source) -> Result<bool, PipelineError> {
        Ok(self.fetcher.cached_index_path(source)?.exists())
    }

    /// Removes the cached index of a shard, and the cached shard: the next [`Storage::open`] reads
    /// both again. A sidecar beside the shard is kept.
    ///
    /// # Errors
    /// [`PipelineError::Io`].
    pub fn forget(&self, source: &Source) -> Result<(), PipelineError> {
        self.fetcher.forget(source)
    }

    /// Checks the members of `shard`, which is `source`, opened, against the headers of the tar,
    /// and its bytes against the checksums that its index and its list state. Samples are not
    /// decoded.
    ///
    /// # Errors
    /// [`PipelineError::BadIndex`] when the members differ, [`PipelineError::ShardMismatch`] when
    /// the bytes differ, and errors of [`Storage::open`].
    pub fn verify(&self, source: &Source, shard: &Shard) -> Result<(), PipelineError> {
        let file = self.open_tar(source, shard)?;
        if let ShardUrl::File(path) = &source.url
            && let Some(index) = sidecar::load(path)?
        {
            // The shard may have been opened with another index, if the sidecar is older than the
            // file.
            return verify::verify(source, shard, &index, &file, &sidecar::path_of(path));
        }
        verify::verify(source, shard, shard.index(), &file, &self.fetcher.cached_index_path(source)?)
    }

    /// Returns the tar of `shard`, which is `source`, opened; fetches it if it is not in the cache.
    fn open_tar(&self, source: &Source, shard: &Shard) -> Result<Arc<File>, PipelineError> {
        match &source.url {
            ShardUrl::File(path) if source.is_read_in_place() => {
                File::open(path).map(Arc::new).map_err(|error| PipelineError::io("open", path, error))
            }
            _ => {
                let name = self.fetcher.cache_name(source)?;
                self.fetcher.file(source, &name, Some((shard.index().shard_bytes, shard.index().checksum)))
            }
        }
    }
}
