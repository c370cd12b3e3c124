//! One shard that is open for reading: its bytes and its index.

pub(crate) mod index;
pub mod sidecar;
pub(crate) mod store;
pub(crate) mod tar;
pub mod write;

use std::path::Path;
use std::sync::Arc;

use crate::PipelineError;
use crate::shard::index::{Member, ShardIndex, check_of};
use crate::shard::store::{CacheUse, LocalStore, Store};

/// Extensions that hold an image, in the order in which they are preferred.
pub const IMAGE_EXTENSIONS: [&str; 4] = ["jpg", "jpeg", "png", "webp"];

/// Extensions that hold a class number as text.
const LABEL_EXTENSIONS: [&str; 2] = ["cls", "cls2"];

/// A class number has at most ten digits; a longer member is none.
const MAX_LABEL_BYTES: u64 = 32;

/// A shard. Shared by threads.
pub struct Shard {
    store: Arc<dyn Store>,
    index: ShardIndex,
}

impl Shard {
    /// A shard of these bytes.
    pub fn new(store: Arc<dyn Store>, index: ShardIndex) -> Self {
        Self { store, index }
    }

    /// Opens the tar at `path`, on a disk of this machine. [`crate::Storage::open`] opens all others.
    ///
    /// # Errors
    /// As [`sidecar::open`] and [`LocalStore::open`].
    pub fn open(path: &Path) -> Result<Self, PipelineError> {
        Ok(Self { index: sidecar::open(path)?, store: Arc::new(LocalStore::open(path)?) })
    }

    /// Where its samples lie.
    pub fn index(&self) -> &ShardIndex {
        &self.index
    }

    /// What it takes of a cache; `None` for one that is read where it stands.
    pub fn cache_use(&self) -> Option<CacheUse> {
        self.store.cache_use()
    }

    /// Has it fetched in the background, if it must be fetched at all.
    pub fn prefetch(&self) {
        Arc::clone(&self.store).prefetch();
    }

    /// Its name, for messages and ledgers.
    pub fn name(&self) -> String {
        self.store.name()
    }

    /// Number of samples, with an image or without.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Key of sample `i`.
    pub fn key(&self, i: usize) -> &str {
        self.index.key(i)
    }

    /// Start of sample `i`'s first member.
    pub fn offset_bytes(&self, i: usize) -> u64 {
        self.index.members(i).next().map_or(0, |member| member.offset_bytes)
    }

    /// Length of sample `i`'s encoded image, if it has one.
    pub fn image_bytes(&self, i: usize) -> Option<u64> {
        self.index.member(i, &IMAGE_EXTENSIONS).map(|member| member.len_bytes)
    }

    /// The encoded image of sample `i`.
    ///
    /// # Errors
    /// [`PipelineError::MissingField`] when it holds no image, [`PipelineError::Changed`] when its bytes
    /// are not those that were indexed, and those of the store.
    pub fn image(&self, i: usize) -> Result<Vec<u8>, PipelineError> {
        let member = self.index.member(i, &IMAGE_EXTENSIONS).ok_or_else(|| PipelineError::MissingField {
            shard: self.name(),
            key: self.key(i).to_string(),
            wanted: IMAGE_EXTENSIONS.join(", "),
        })?;
        self.bytes_of(i, &member)
    }

    /// The class of sample `i`, where it has one.
    ///
    /// # Errors
    /// As [`Shard::image`].
    pub fn label(&self, i: usize) -> Result<Option<u32>, PipelineError> {
        let Some(member) = self.index.member(i, &LABEL_EXTENSIONS) else { return Ok(None) };
        if member.len_bytes > MAX_LABEL_BYTES {
            return Ok(None);
        }
        let text = self.bytes_of(i, &member)?;
        Ok(std::str::from_utf8(&text).ok().and_then(|text| text.trim().parse().ok()))
    }

    /// All members of sample `i` in the order of the tar: extension and bytes.
    ///
    /// # Errors
    /// As [`Shard::image`].
    pub fn members(&self, i: usize) -> Result<Vec<(String, Vec<u8>)>, PipelineError> {
        self.index.members(i).map(|m| Ok((m.extension.to_string(), self.bytes_of(i, &m)?))).collect()
    }

    fn bytes_of(&self, i: usize, member: &Member<'_>) -> Result<Vec<u8>, PipelineError> {
        let mut bytes = vec![0; member.len_bytes as usize];
        self.store.read_at(member.offset_bytes, &mut bytes)?;
        if member.check.is_some_and(|check| check != check_of(&bytes)) {
            let (shard, key) = (self.name(), self.key(i).to_string());
            return Err(PipelineError::Changed { shard, key, extension: member.extension.to_string() });
        }
        Ok(bytes)
    }
}

impl std::fmt::Debug for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shard").field("name", &self.name()).field("len", &self.len()).finish()
    }
}
