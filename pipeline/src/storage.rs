//! From what a user names to shards that can be read, wherever they are.
//!
//! A tar on a disk of this machine is read where it stands. Everything else — a server's, a store's, a
//! command's, a compressed one — is read from the [cache](crate::cache), which gets it as a whole
//! when it is first needed.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crossbeam::channel::{Sender, unbounded};

use crate::cache::{Cache, Filling};
use crate::index::ShardIndex;
use crate::receive::{failed, receive};
use crate::remote::fetch::Failure;
use crate::remote::{Client, RetryPolicy};
use crate::shard::Shard;
use crate::store::{CachedStore, LocalStore};
use crate::url::ShardUrl;
use crate::{PipelineError, url, wids};

/// A list of shards, or the index of one, is never larger.
const MAX_TEXT_BYTES: u64 = 1 << 30;

/// Shards that are opened at a time: what opening costs is waiting.
const OPENERS: usize = 16;

/// What a user can do about an index that does not fit any more.
const REPLACED: &str = "if it was replaced, `ocelli shards index --overwrite` reads it anew";

/// Where shards are kept and how they are fetched.
#[derive(Debug, Clone)]
pub struct StorageConfig {
    /// Folder of the cache; made when it is needed.
    pub cache_folder: PathBuf,
    /// Bytes of shards in the cache at the most.
    pub cache_bytes: u64,
    /// Shards that are fetched at a time.
    pub n_fetches: usize,
    /// Credentials of object stores, under the names of the usual environment variables.
    pub options: Vec<(String, String)>,
    /// What is done about failures.
    pub retry: RetryPolicy,
}

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

/// Opens shards. Shared by threads; copies are the same storage.
#[derive(Clone)]
pub struct Storage {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) config: StorageConfig,
    pub(crate) cache: Cache,
    client: OnceLock<Result<Client, String>>,
    prefetcher: Mutex<Option<Sender<Arc<CachedStore>>>>,
}

impl StorageConfig {
    /// A cache of 100 GB in `cache_folder`, four fetches at a time, no credentials.
    pub fn new(cache_folder: PathBuf) -> Self {
        Self {
            cache_folder,
            cache_bytes: 100_000_000_000,
            n_fetches: 4,
            options: Vec::new(),
            retry: RetryPolicy::default(),
        }
    }
}

impl Source {
    /// Whether it is a tar on a disk of this machine, and not one that the cache holds.
    pub fn is_read_in_place(&self) -> bool {
        matches!(self.url, ShardUrl::File(_)) && !self.url.is_gzip()
    }
}

impl Storage {
    /// A storage. Nothing is touched until it is needed.
    pub fn new(config: StorageConfig) -> Self {
        let cache = Cache::new(config.cache_folder.clone(), config.cache_bytes, config.n_fetches);
        let inner = Inner { config, cache, client: OnceLock::new(), prefetcher: Mutex::default() };
        Self { inner: Arc::new(inner) }
    }

    /// The shards that `specs` name ([`url::expand`]), those of `wids` lists in their place.
    ///
    /// # Errors
    /// As [`url::expand`]; what is wrong with a list.
    pub fn sources(&self, specs: &[String]) -> Result<Vec<Source>, PipelineError> {
        let mut sources = Vec::new();
        for url in url::expand(specs)? {
            match url.is_list() {
                true => sources.extend(wids::shards(&url, &|list: &ShardUrl| self.read_list(list))?),
                false => sources.push(Source { url, len_bytes: None, md5: None }),
            }
        }
        if sources.is_empty() {
            let reason = "its lists name no shard".into();
            return Err(PipelineError::BadUrl { spec: specs.join(" "), reason });
        }
        Ok(sources)
    }

    /// Opens a shard. Only its index is read, if it has one.
    ///
    /// # Errors
    /// As [`ShardIndex::open`] and [`LocalStore::open`] for a tar on a disk; for others
    /// [`PipelineError::Fetch`], [`PipelineError::OtherShard`], and those of the cache.
    pub fn open(&self, source: &Source) -> Result<Shard, PipelineError> {
        let shard = match &source.url {
            ShardUrl::File(path) if source.is_read_in_place() => {
                Shard::new(Arc::new(LocalStore::open(path)?), self.local_index(source, path)?)
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
        let name = self.cache_name(source)?;
        let index = self.cached_index(source, &name)?;
        let store = CachedStore {
            storage: self.clone(),
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

    /// Bytes that the cache may hold.
    pub fn cache_bytes(&self) -> u64 {
        self.inner.cache.max_bytes()
    }

    /// The tar of `shard`, which is `source` opened; fetched if it is not there.
    pub(crate) fn file_of(&self, source: &Source, shard: &Shard) -> Result<Arc<File>, PipelineError> {
        match &source.url {
            ShardUrl::File(path) if source.is_read_in_place() => {
                File::open(path).map(Arc::new).map_err(|error| PipelineError::io("open", path, error))
            }
            _ => {
                let name = self.cache_name(source)?;
                self.file(source, &name, Some((shard.index().shard_bytes, shard.index().checksum)))
            }
        }
    }

    /// Closes a handle on a cached shard that failed.
    pub(crate) fn close(&self, cache_name: &str, failed: &Arc<File>) {
        self.inner.cache.close(cache_name, failed);
    }

    /// Whether the cache holds the index of a shard.
    ///
    /// # Errors
    /// [`PipelineError::MissingShard`], [`PipelineError::Io`].
    pub fn has_index(&self, source: &Source) -> Result<bool, PipelineError> {
        Ok(self.kept_index_path(source)?.exists())
    }

    /// Where the index of a shard is kept that has none beside it.
    pub(crate) fn kept_index_path(&self, source: &Source) -> Result<PathBuf, PipelineError> {
        Ok(ShardIndex::sidecar_path(&self.inner.cache.path(&self.cache_name(source)?)))
    }

    /// Forgets the index that is kept for a shard, and the shard: the next [`Storage::open`] reads both
    /// again. What stands beside the shard stays.
    ///
    /// # Errors
    /// [`PipelineError::Io`].
    pub fn forget(&self, source: &Source) -> Result<(), PipelineError> {
        let path = self.inner.cache.path(&self.cache_name(source)?);
        for path in [ShardIndex::sidecar_path(&path), path] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(PipelineError::io("remove", &path, error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Has `store`'s shard fetched by a thread of its own, after those that were asked for before.
    pub(crate) fn prefetch(&self, store: Arc<CachedStore>) {
        let mut prefetcher = self.inner.prefetcher.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = prefetcher.get_or_insert_with(|| {
            let (sender, stores) = unbounded::<Arc<CachedStore>>();
            for _ in 0..self.inner.config.n_fetches.max(1) {
                let stores = stores.clone();
                std::thread::spawn(move || {
                    for store in stores {
                        // Whoever needs the shard will try again, and tell.
                        let _ = store.file();
                    }
                });
            }
            sender
        });
        // The threads end with the storage, which holds the sender.
        let _ = sender.send(store);
    }

    /// The cached file of a shard, fetched if it is not there. `expected` is the length and the checksum
    /// that its index gives.
    pub(crate) fn file(
        &self,
        source: &Source,
        name: &str,
        expected: Option<(u64, Option<u64>)>,
    ) -> Result<Arc<File>, PipelineError> {
        let check = |filling: &Filling<'_>| -> Result<(), PipelineError> {
            let Some((expected_bytes, checksum)) = expected else {
                // A compressed stream has a checksum of its own at its end.
                if source.url.is_gzip() || filling.is_whole_tar() {
                    return Ok(());
                }
                let reason = "it does not end as a tar does, and nothing said how long it is: perhaps not all \
                              of it came";
                return Err(PipelineError::Fetch { url: source.url.to_string(), reason: reason.into() });
            };
            let (len_bytes, hash) = filling.written();
            let other = |reason| PipelineError::OtherShard { shard: source.url.to_string(), reason };
            if expected_bytes != len_bytes {
                return Err(other(format!(
                    "it has {len_bytes} bytes, its index says {expected_bytes}; {REPLACED}"
                )));
            }
            match checksum.is_some_and(|checksum| checksum != hash) {
                true => Err(other(format!("its checksum differs from its index; {REPLACED}"))),
                false => Ok(()),
            }
        };
        self.inner.cache.file(name, expected.map(|(expected_bytes, _)| expected_bytes), |filling| {
            let mut fill = || -> Result<(), PipelineError> {
                receive(source, || self.client(), &self.inner.config.retry, filling)?;
                check(filling)
            };
            match fill() {
                Err(error @ PipelineError::OtherShard { .. }) => {
                    tracing::warn!("{error}; fetching it once more");
                    fill()
                }
                filled => filled,
            }
        })
    }

    fn client(&self) -> Result<&Client, Failure> {
        let config = &self.inner.config;
        let made = self.inner.client.get_or_init(|| {
            Client::new(config.options.clone(), config.retry.clone()).map_err(|error| error.to_string())
        });
        made.as_ref().map_err(|reason| Failure::Refused(reason.clone()))
    }

    fn read_list(&self, list: &ShardUrl) -> Result<Vec<u8>, PipelineError> {
        self.read_text(list).map_err(|failure| failed(list, failure))
    }

    /// A list or a sidecar, in memory.
    pub(crate) fn read_text(&self, url: &ShardUrl) -> Result<Vec<u8>, Failure> {
        match url {
            ShardUrl::File(path) => fs::read(path).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => Failure::NotFound,
                _ => Failure::Sink(error),
            }),
            ShardUrl::Remote(url) => self.client()?.read(url, MAX_TEXT_BYTES),
            ShardUrl::Pipe(_) => Err(Failure::NotFound),
        }
    }
}
