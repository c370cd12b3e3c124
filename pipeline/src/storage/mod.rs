//! From what a user names to shards that can be read, wherever they are.
//!
//! A tar on a disk of this machine is read where it stands. Everything else — a server's, a store's, a
//! command's, a compressed one — is read from the [cache], which gets it as a whole
//! when it is first needed.

mod cache;
mod cached;
mod config;
mod fetcher;
mod index;
mod name;
mod part;
mod receive;
mod verify;
mod wids;

pub use config::StorageConfig;

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cached::CachedStore;
use fetcher::Fetcher;
use index::{cached_index, local_index};
use receive::failed;

use crate::shard::Shard;
use crate::shard::sidecar;
use crate::shard::store::LocalStore;
use crate::source::Source;
use crate::url::ShardUrl;
use crate::{PipelineError, url};

/// Shards that are opened at a time: what opening costs is waiting.
const OPENERS: usize = 16;

/// Opens shards. Shared by threads; copies are the same storage.
#[derive(Clone)]
pub struct Storage {
    fetcher: Fetcher,
}

impl Storage {
    /// A storage. Nothing is touched until it is needed.
    pub fn new(config: StorageConfig) -> Self {
        Self { fetcher: Fetcher::new(config) }
    }

    /// The shards that `specs` name ([`url::expand`]), those of `wids` lists in their place.
    ///
    /// # Errors
    /// As [`url::expand`]; what is wrong with a list.
    pub fn sources(&self, specs: &[String]) -> Result<Vec<Source>, PipelineError> {
        let mut sources = Vec::new();
        for url in url::expand(specs)? {
            match url.is_list() {
                true => sources.extend(wids::shards(&url, &|list: &ShardUrl| {
                    self.fetcher.read_text(list).map_err(|failure| failed(list, failure))
                })?),
                false => sources.push(Source { url, len_bytes: None, md5: None }),
            }
        }
        if sources.is_empty() {
            return Err(url::bad_url(&specs.join(" "), "its lists name no shard".into()));
        }
        Ok(sources)
    }

    /// Opens a shard. Only its index is read, if it has one.
    ///
    /// # Errors
    /// As [`sidecar::open`] and [`LocalStore::open`] for a tar on a disk; for others
    /// [`PipelineError::Fetch`], [`PipelineError::OtherShard`], and those of the cache.
    pub fn open(&self, source: &Source) -> Result<Shard, PipelineError> {
        let shard = match &source.url {
            ShardUrl::File(path) if source.is_read_in_place() => {
                Shard::new(Arc::new(LocalStore::open(path)?), local_index(&self.fetcher, source, path)?)
            }
            _ => self.open_cached(source)?,
        };
        // What a list says of a compressed shard is of bytes that are gone.
        let (says, has) = (source.len_bytes.filter(|_| !source.url.is_gzip()), shard.index().shard_bytes);
        match says {
            Some(says) if says != has => {
                let reason = format!("its list says {says} bytes, it has {has}");
                Err(PipelineError::OtherShard { shard: source.url.to_string(), reason })
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
        Ok(Shard::new(Arc::new(store), index))
    }

    /// Opens shards, in their order.
    ///
    /// # Errors
    /// As [`Storage::open`]: that of the first shard that has one.
    pub fn open_all(&self, sources: &[Source]) -> Result<Vec<Shard>, PipelineError> {
        let next = AtomicUsize::new(0);
        let opened: Mutex<Vec<Option<Result<Shard, PipelineError>>>> =
            Mutex::new(sources.iter().map(|_| None).collect());
        let work = || {
            while let Some(i) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|i| *i < sources.len()) {
                let shard = self.open(&sources[i]);
                if shard.is_err() {
                    // Nobody needs the rest.
                    next.store(sources.len(), Ordering::Relaxed);
                }
                opened.lock().unwrap_or_else(PoisonError::into_inner)[i] = Some(shard);
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..OPENERS.min(sources.len()) {
                scope.spawn(work);
            }
        });
        opened.into_inner().unwrap_or_else(PoisonError::into_inner).into_iter().flatten().collect()
    }

    /// Whether the cache holds the index of a shard.
    ///
    /// # Errors
    /// [`PipelineError::MissingShard`], [`PipelineError::Io`].
    pub fn has_index(&self, source: &Source) -> Result<bool, PipelineError> {
        Ok(self.fetcher.kept_index_path(source)?.exists())
    }

    /// Forgets the index that is kept for a shard, and the shard: the next [`Storage::open`] reads both
    /// again. What stands beside the shard stays.
    ///
    /// # Errors
    /// [`PipelineError::Io`].
    pub fn forget(&self, source: &Source) -> Result<(), PipelineError> {
        self.fetcher.forget(source)
    }

    /// Checks the members of `shard`, which is `source` opened, against the headers of the tar, and its
    /// bytes against the checksums that its index and its list give. Samples are not looked at.
    ///
    /// # Errors
    /// [`PipelineError::BadIndex`] when the members are others, [`PipelineError::OtherShard`] when the
    /// bytes are, and those of [`Storage::open`].
    pub fn verify(&self, source: &Source, shard: &Shard) -> Result<(), PipelineError> {
        verify::verify(source, shard, &*self.file_of(source, shard)?, &self.index_path(source)?)
    }

    /// The tar of `shard`, which is `source` opened; fetched if it is not there.
    fn file_of(&self, source: &Source, shard: &Shard) -> Result<Arc<File>, PipelineError> {
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

    /// The file that holds the index of `source`.
    fn index_path(&self, source: &Source) -> Result<PathBuf, PipelineError> {
        match &source.url {
            ShardUrl::File(path) if sidecar::path_of(path).exists() => Ok(sidecar::path_of(path)),
            _ => self.fetcher.kept_index_path(source),
        }
    }
}
