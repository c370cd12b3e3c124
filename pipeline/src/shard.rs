//! One shard that is open for reading: its bytes and its index.

use std::path::{Path, PathBuf};

use crate::PipelineError;
use crate::dataset::IMAGE_EXTENSIONS;
use crate::index::{Member, ShardIndex};
use crate::store::{LocalStore, Store};

/// Extensions that hold a class number as text.
const LABEL_EXTENSIONS: [&str; 2] = ["cls", "cls2"];

/// A shard. Shared by threads.
pub struct Shard {
    store: Box<dyn Store>,
    index: ShardIndex,
}

impl Shard {
    /// Opens the shard at `path`.
    ///
    /// # Errors
    /// As [`ShardIndex::open`] and [`LocalStore::open`].
    pub fn open(path: &Path) -> Result<Self, PipelineError> {
        Ok(Self { index: ShardIndex::open(path)?, store: Box::new(LocalStore::open(path)?) })
    }

    /// Opens the shards at `paths`, in their order.
    ///
    /// # Errors
    /// As [`Shard::open`].
    pub fn open_all<'a>(paths: impl IntoIterator<Item = &'a PathBuf>) -> Result<Vec<Self>, PipelineError> {
        paths.into_iter().map(|path| Self::open(path)).collect()
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
    /// [`PipelineError::MissingField`] when it holds no image, [`PipelineError::Io`] when the
    /// shard cannot be read.
    pub fn image(&self, i: usize) -> Result<Vec<u8>, PipelineError> {
        let member = self.index.member(i, &IMAGE_EXTENSIONS).ok_or_else(|| PipelineError::MissingField {
            shard: self.name(),
            key: self.key(i).to_string(),
            wanted: IMAGE_EXTENSIONS.join(", "),
        })?;
        self.bytes_of(&member)
    }

    /// The class of sample `i`, where it has one.
    ///
    /// # Errors
    /// [`PipelineError::Io`] when the shard cannot be read.
    pub fn label(&self, i: usize) -> Result<Option<u32>, PipelineError> {
        let Some(member) = self.index.member(i, &LABEL_EXTENSIONS) else { return Ok(None) };
        // A class number has at most ten digits; anything longer is not one.
        let mut text = vec![0; member.len_bytes.min(32) as usize];
        self.store.read_at(member.offset_bytes, &mut text)?;
        Ok(std::str::from_utf8(&text).ok().and_then(|text| text.trim().parse().ok()))
    }

    /// All members of sample `i` in the order of the tar: extension and bytes.
    ///
    /// # Errors
    /// [`PipelineError::Io`] when the shard cannot be read.
    pub fn members(&self, i: usize) -> Result<Vec<(String, Vec<u8>)>, PipelineError> {
        self.index.members(i).map(|m| Ok((m.extension.to_string(), self.bytes_of(&m)?))).collect()
    }

    fn bytes_of(&self, member: &Member<'_>) -> Result<Vec<u8>, PipelineError> {
        let mut bytes = vec![0; member.len_bytes as usize];
        self.store.read_at(member.offset_bytes, &mut bytes)?;
        Ok(bytes)
    }
}

impl std::fmt::Debug for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shard").field("name", &self.name()).field("len", &self.len()).finish()
    }
}
