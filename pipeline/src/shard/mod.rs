//! Shards that are open for reading: their bytes and their indices.

pub mod classes;
pub mod files;
pub(crate) mod handles;
pub mod image;
pub(crate) mod index;
mod open;
pub mod sidecar;
pub(crate) mod store;
pub(crate) mod tar;
pub mod write;

use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, OnceLock};

use xxhash_rust::xxh3::xxh3_64;

use crate::PipelineError;
use crate::shard::classes::{Columns, canonical_class, classes_of, distinct, stated_class, states_no_class};
use crate::shard::image::{EncodedImage, image_members};
use crate::shard::index::{Member, ShardIndex, short_checksum};
use crate::shard::store::{CacheUse, LocalStore, Store};

pub use image::{IMAGE_EXTENSIONS, MASK_EXTENSIONS};
pub use tar::text_of_name;

/// Extensions of members that hold classes as text, numbers or names.
const CLASS_EXTENSIONS: [&str; 3] = ["cls", "cls2", "output.cls"];

/// Maximum length of a member that holds classes, in bytes.
pub const MAX_CLASS_BYTES: u64 = 64 << 10;

/// Maximum length of a `.json` member that is searched for classes, in bytes.
const MAX_JSON_BYTES: u64 = 1 << 20;

/// A shard that is open for reading. Shared by threads.
pub struct Shard {
    store: Arc<dyn Store>,
    index: ShardIndex,
    /// Hash of the current bytes, once it is known.
    content_hash: OnceLock<u64>,
    /// Path of the shard in the cache whose index is updated when the hash has been computed.
    cached_index: Option<PathBuf>,
}

impl Shard {
    /// Creates a shard from its bytes and its index.
    pub fn new(store: Arc<dyn Store>, index: ShardIndex) -> Self {
        Self { store, index, content_hash: OnceLock::new(), cached_index: None }
    }

    /// Creates a shard as [`Shard::new`] does, with an index whose checksum covers the current
    /// bytes.
    pub(crate) fn with_current_index(store: Arc<dyn Store>, index: ShardIndex) -> Self {
        let content_hash = index.checksum.map(OnceLock::from).unwrap_or_default();
        Self { store, index, content_hash, cached_index: None }
    }

    /// Creates a shard as [`Shard::new`] does, with an index that is saved as the index of the file
    /// `cached` once the hash of the bytes has been computed.
    pub(crate) fn with_cached_index(store: Arc<dyn Store>, index: ShardIndex, cached: PathBuf) -> Self {
        Self { store, index, content_hash: OnceLock::new(), cached_index: Some(cached) }
    }

    /// Opens the tar at `path`, on a local disk. [`crate::Storage::open`] opens all other shards.
    ///
    /// # Errors
    /// As [`sidecar::open`] and [`LocalStore::open`].
    pub fn open(path: &Path) -> Result<Self, PipelineError> {
        let store = Arc::new(LocalStore::open(path)?);
        if let Some(index) = sidecar::load_current(path, store.stamp())? {
            return Ok(Self::with_current_index(store, index));
        }
        Ok(Self::new(store, sidecar::open(path)?))
    }

    /// Returns the index of the samples.
    pub fn index(&self) -> &ShardIndex {
        &self.index
    }

    /// Returns a hash that identifies the samples. It is equal for shards with the same bytes, at
    /// any location, and for shards of the same image files (see [`crate::identity`]). May read the
    /// whole shard, once.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn fingerprint(&self) -> Result<u64, PipelineError> {
        let content_hash = self.content_hash()?;
        Ok(xxh3_64(&[self.index.listing_hash(), content_hash].map(u64::to_le_bytes).concat()))
    }

    fn content_hash(&self) -> Result<u64, PipelineError> {
        if let Some(hash) = self.content_hash.get() {
            return Ok(*hash);
        }
        let hash = self.store.content_hash()?;
        if self.content_hash.set(hash).is_ok()
            && let Some(cached) = &self.cached_index
        {
            let mut index = self.index.clone();
            index.checksum = Some(hash);
            // If the index cannot be written, the next command computes the hash again.
            let _ = sidecar::save(&index, cached);
        }
        Ok(hash)
    }

    /// Returns the shard's share of the cache; `None` for a shard that is read in place.
    pub fn cache_use(&self) -> Option<CacheUse> {
        self.store.cache_use()
    }

    /// Starts fetching the shard in the background, if it has to be fetched.
    pub fn prefetch(&self) {
        Arc::clone(&self.store).prefetch();
    }

    /// Returns the name of the shard, for messages and ledgers.
    pub fn name(&self) -> String {
        self.store.name()
    }

    /// Returns the number of samples, including those without an image.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Returns whether the shard holds no sample.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Returns the key of sample `i`.
    pub fn key(&self, i: usize) -> &str {
        without_current_folder(self.index.key(i))
    }

    /// Returns the file of sample `i`'s image; `None` for a sample of a shard.
    pub fn single_file(&self, i: usize) -> Option<&Path> {
        self.store.single_file(self.offset_bytes(i))
    }

    /// Returns the offset of sample `i`'s first member, in bytes.
    pub fn offset_bytes(&self, i: usize) -> u64 {
        self.index.members(i).next().map_or(0, |member| member.offset_bytes)
    }

    /// Returns the length of sample `i`'s encoded image in bytes, if it has one.
    pub fn image_bytes(&self, i: usize) -> Option<u64> {
        if let Some(member) = self.index.member(i, &IMAGE_EXTENSIONS) {
            return Some(member.len_bytes);
        }
        let bands = image_members(&self.index, i);
        if bands.is_empty() {
            return None;
        }
        Some(bands.iter().map(|member| member.len_bytes).sum())
    }

    /// Returns the length of sample `i`'s encoded mask in bytes, if it has one.
    pub fn mask_bytes(&self, i: usize) -> Option<u64> {
        self.index.member(i, &MASK_EXTENSIONS).map(|member| member.len_bytes)
    }

    /// Returns the encoded image of sample `i`.
    ///
    /// # Errors
    /// [`PipelineError::MissingField`] when it holds no image, [`PipelineError::Changed`] when its
    /// bytes are not those that were indexed, and errors of the store.
    pub fn image(&self, i: usize) -> Result<EncodedImage, PipelineError> {
        let mut members = image_members(&self.index, i).into_iter();
        let first = members.next().ok_or_else(|| PipelineError::MissingField {
            shard: self.name(),
            key: self.key(i).to_string(),
            wanted: IMAGE_EXTENSIONS.join(", "),
        })?;
        let mut image = EncodedImage::from(self.read_member(i, &first)?);
        for member in members {
            image.push(&self.read_member(i, &member)?);
        }
        Ok(image)
    }

    /// Returns the class of sample `i`, if it has a class member that holds a number.
    ///
    /// # Errors
    /// As [`Shard::image`].
    pub fn label(&self, i: usize) -> Result<Option<u32>, PipelineError> {
        let Some(text) = self.class_member(i)? else { return Ok(None) };
        Ok(canonical_class(&text).and_then(|class| class.parse().ok()))
    }

    /// Returns the classes of sample `i`, numbers or names, without duplicates. They are the lines
    /// of the class member, or the value or list under `label` or `labels` in its `.json`, or else
    /// the outermost folder of its key.
    ///
    /// # Errors
    /// As [`Shard::image`].
    pub fn classes(&self, i: usize) -> Result<Vec<String>, PipelineError> {
        if let Some(text) = self.class_member(i)? {
            return Ok(distinct(text.lines().filter_map(canonical_class)));
        }
        if let Some(columns) = self.columns_with_class(i)? {
            return Ok(classes_of(&columns));
        }
        if self.has_class_member(i) {
            return Ok(Vec::new());
        }
        Ok(self.class_folder(i).into_iter().collect())
    }

    /// Returns whether sample `i` states that it is of no class: by an empty class member, or,
    /// without one, by an empty list under `label` or `labels` in its `.json`. A negative number
    /// does not: the class is not known.
    ///
    /// # Errors
    /// As [`Shard::image`].
    pub fn states_no_class(&self, i: usize) -> Result<bool, PipelineError> {
        if let Some(text) = self.class_member(i)? {
            return Ok(text.trim().is_empty());
        }
        let columns = self.columns_with_class(i)?;
        Ok(columns.is_some_and(|columns| states_no_class(&columns)))
    }

    /// Returns whether the class of sample `i` comes from the name of its folder.
    ///
    /// # Errors
    /// As [`Shard::image`].
    pub fn has_class_of_folder(&self, i: usize) -> Result<bool, PipelineError> {
        if self.class_folder(i).is_none() || self.has_class_member(i) {
            return Ok(false);
        }
        Ok(self.columns_with_class(i)?.is_none())
    }

    /// Returns the columns of sample `i`, if they state its class or that it has none.
    fn columns_with_class(&self, i: usize) -> Result<Option<Columns>, PipelineError> {
        let Some(member) = self.index.member(i, &["json"]) else { return Ok(None) };
        if member.len_bytes > MAX_JSON_BYTES {
            return Ok(None);
        }
        let columns: Columns = serde_json::from_slice(&self.read_member(i, &member)?).unwrap_or_default();
        Ok(stated_class(&columns).is_some().then_some(columns))
    }

    /// Returns the outermost folder of sample `i` as a class. It is the class of the sample if
    /// neither a member nor a column states one.
    fn class_folder(&self, i: usize) -> Option<String> {
        outermost_folder(self.key(i)).and_then(canonical_class)
    }

    /// Returns whether sample `i` has a class member, even if that is not text.
    fn has_class_member(&self, i: usize) -> bool {
        self.index.member(i, &CLASS_EXTENSIONS).is_some() || self.only_class_with_dots(i).is_some()
    }

    /// Returns the member of sample `i` with the first of `extensions` that the sample has.
    ///
    /// # Errors
    /// As [`Shard::image`].
    pub fn member(&self, i: usize, extensions: &[&str]) -> Result<Option<Vec<u8>>, PipelineError> {
        self.index.member(i, extensions).map(|member| self.read_member(i, &member)).transpose()
    }

    /// Returns the text of the member that holds the class.
    fn class_member(&self, i: usize) -> Result<Option<String>, PipelineError> {
        let member = self.index.member(i, &CLASS_EXTENSIONS).or_else(|| self.only_class_with_dots(i));
        let Some(member) = member.filter(|member| member.len_bytes <= MAX_CLASS_BYTES) else {
            return Ok(None);
        };
        let bytes = self.read_member(i, &member)?;
        Ok(std::str::from_utf8(&bytes).ok().map(str::to_string))
    }

    /// Returns the class member of a sample such as `x.v1.0.png` and `x.v1.0.cls`, whose key ends
    /// at the first dot: the only one whose extension ends in `.cls`.
    fn only_class_with_dots(&self, i: usize) -> Option<Member<'_>> {
        let mut class_members = self.index.members(i).filter(|member| member.extension.ends_with(".cls"));
        let first = class_members.next()?;
        if class_members.next().is_some() { None } else { Some(first) }
    }

    /// Returns the extensions and bytes of all members of sample `i` in the order of the tar. A
    /// class from the folder is added as a member, so that a copy of the sample keeps it under any
    /// key.
    ///
    /// # Errors
    /// As [`Shard::image`].
    pub fn members(&self, i: usize) -> Result<Vec<(String, Vec<u8>)>, PipelineError> {
        let mut members = Vec::new();
        for member in self.index.members(i) {
            members.push((member.extension.to_string(), self.read_member(i, &member)?));
        }
        if self.has_class_of_folder(i)?
            && let Some(class) = self.class_folder(i)
        {
            members.push(("cls".into(), class.into_bytes()));
        }
        Ok(members)
    }

    /// Reads a member of sample `i`, and compares it with its check.
    fn read_member(&self, i: usize, member: &Member<'_>) -> Result<Vec<u8>, PipelineError> {
        let mut bytes = vec![0; member.len_bytes as usize];
        self.store.read_at(member.offset_bytes, &mut bytes)?;
        if member.check.is_some_and(|check| check != short_checksum(&bytes)) {
            let shard = self.name();
            let key = self.key(i).to_string();
            return Err(PipelineError::Changed { shard, key, extension: member.extension.to_string() });
        }
        Ok(bytes)
    }
}

/// Returns a key without the `./` that tar puts before the names of files of a folder.
fn without_current_folder(mut key: &str) -> &str {
    while let Some(rest) = key.strip_prefix("./") {
        key = rest;
    }
    key
}

/// Returns whether extraction of a member with this name would write outside the target folder.
pub fn leads_out_of_folder(name: &str) -> bool {
    !Path::new(name).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir))
}

/// Returns the outermost folder of a key, which is also the class of an image in a folder of
/// images.
fn outermost_folder(key: &str) -> Option<&str> {
    let (folder, _) = key.trim_start_matches('/').split_once('/')?;
    if folder.is_empty() { None } else { Some(folder) }
}

impl std::fmt::Debug for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shard").field("name", &self.name()).field("len", &self.len()).finish()
    }
}
