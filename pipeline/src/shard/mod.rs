//! One shard that is open for reading: its bytes and its index.

pub(crate) mod index;
mod open;
pub mod sidecar;
pub(crate) mod store;
pub(crate) mod tar;
pub mod write;

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use crate::PipelineError;
use crate::shard::index::{Member, ShardIndex, check_of};
use crate::shard::store::{CacheUse, LocalStore, Store};

/// Extensions that hold an image, in the order in which they are preferred.
pub const IMAGE_EXTENSIONS: [&str; 8] =
    ["jpg", "jpeg", "png", "webp", "input.jpg", "input.jpeg", "input.png", "input.webp"];

/// Extensions that hold a class as text, a number or a name.
const CLASS_EXTENSIONS: [&str; 3] = ["cls", "cls2", "output.cls"];

/// A longer member is no list of classes.
const MAX_CLASS_BYTES: u64 = 64 << 10;

/// A longer member is not searched for a class.
const MAX_JSON_BYTES: u64 = 1 << 20;

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

    /// The class of sample `i` where it has a member of its own and that is a number.
    ///
    /// # Errors
    /// As [`Shard::image`].
    pub fn label(&self, i: usize) -> Result<Option<u32>, PipelineError> {
        Ok(self.class_member(i)?.and_then(|text| canonical(&text)?.parse().ok()))
    }

    /// The classes of sample `i`, numbers or names, each once: from a member of its own, one a line, or under `label` or
    /// `labels` in its `.json`, a value or a list.
    ///
    /// # Errors
    /// As [`Shard::image`].
    pub fn classes(&self, i: usize) -> Result<Vec<String>, PipelineError> {
        if let Some(text) = self.class_member(i)? {
            return Ok(once(text.lines().filter_map(canonical)));
        }
        match self.index.member(i, &["json"]).filter(|member| member.len_bytes <= MAX_JSON_BYTES) {
            Some(member) => Ok(classes_in(&self.bytes_of(i, &member)?)),
            None => Ok(Vec::new()),
        }
    }

    /// The first of the members of sample `i` that have one of `extensions`, in their order.
    ///
    /// # Errors
    /// As [`Shard::image`].
    pub fn member(&self, i: usize, extensions: &[&str]) -> Result<Option<Vec<u8>>, PipelineError> {
        self.index.member(i, extensions).map(|member| self.bytes_of(i, &member)).transpose()
    }

    /// The text of the member that holds the class.
    fn class_member(&self, i: usize) -> Result<Option<String>, PipelineError> {
        let member = self.index.member(i, &CLASS_EXTENSIONS);
        let Some(member) = member.filter(|member| member.len_bytes <= MAX_CLASS_BYTES) else {
            return Ok(None);
        };
        let bytes = self.bytes_of(i, &member)?;
        Ok(std::str::from_utf8(&bytes).ok().map(str::to_string))
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

/// A class as it is compared: 7 for 007, without space around it. Negative numbers stand for no class.
fn canonical(text: &str) -> Option<String> {
    let text = text.trim();
    match text.parse::<i64>() {
        Ok(number) if number < 0 => None,
        Ok(number) => Some(number.to_string()),
        Err(_) => Some(text.to_string()).filter(|text| !text.is_empty()),
    }
}

/// What JSON has under `label`, or else under `labels`: numbers and texts, one or a list of them.
fn classes_in(json: &[u8]) -> Vec<String> {
    let value: serde_json::Value = serde_json::from_slice(json).unwrap_or_default();
    let found = value.get("label").or_else(|| value.get("labels"));
    let values = match found {
        Some(serde_json::Value::Array(values)) => values.as_slice(),
        Some(value) => std::slice::from_ref(value),
        None => &[],
    };
    let class = |value: &serde_json::Value| match value {
        serde_json::Value::String(text) => canonical(text),
        serde_json::Value::Number(number) => number.as_u64().map(|number| number.to_string()),
        _ => None,
    };
    once(values.iter().filter_map(class))
}

/// Each class once, at its first place: detection sets name a class for every box.
fn once(classes: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen = HashSet::new();
    classes.filter(|class| seen.insert(class.clone())).collect()
}

impl std::fmt::Debug for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shard").field("name", &self.name()).field("len", &self.len()).finish()
    }
}
