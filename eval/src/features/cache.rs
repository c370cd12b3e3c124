//! Cache of features on disk, keyed by the weights, the images and the transform; probes memory-map
//! its files.
//!
//! `<name>.f32` holds the rows, `<name>.json` their description. The JSON is written last: without
//! it there is no entry. The least recently used entries are evicted first.
//!
//! Images of shards are identified by the hashes of the shards, wherever these are, and images in
//! single files by the names and stamps of the files. The description has a checksum of itself and
//! of the rows, which is compared before the rows are used.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use networks::Network;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::columns::{Columns, FeatureKind};
use super::extract::{extract, table};
use super::mapped::Mapped;
use super::table::Table;
use crate::EvalError;
use crate::images::ImageSet;
use pipeline::Progress;

/// Version of the rows; raised when the same weights and images would give other rows.
const VERSION: u32 = 4;

/// Age at which temporary files of killed processes are removed.
const STALE_AFTER: Duration = Duration::from_secs(24 * 3600);

/// A folder of cached features.
#[derive(Debug, Clone)]
pub struct FeatureCache {
    folder: PathBuf,
    max_bytes: u64,
}

/// Description of an entry's rows.
#[derive(Debug, Serialize, Deserialize)]
struct CacheEntry {
    version: u32,
    columns: Columns,
    n_rows: usize,
    /// Indices of the images without a row: those that cannot be decoded.
    bad: Vec<u32>,
    /// Number of images in the set.
    n_images: usize,
    /// XXH3-64 of the rows' hash and the fields above.
    checksum: String,
}

impl CacheEntry {
    /// Returns the checksum of the entry, given the hash of its rows.
    fn checksum(&self, rows: u64) -> String {
        let about = format!(
            "{rows:016x} {} {:?} {} {:?} {}",
            self.version, self.columns, self.n_rows, self.bad, self.n_images
        );
        format!("{:016x}", xxhash_rust::xxh3::xxh3_64(about.as_bytes()))
    }

    /// Returns whether the entry matches `images` and the length of the rows' file at `path`.
    fn is_complete(&self, path: &Path, images: &ImageSet) -> bool {
        let len = (self.n_rows * self.columns.width() * size_of::<f32>()) as u64;
        self.version == VERSION
            && self.n_images == images.len()
            && self.n_rows + self.bad.len() == self.n_images
            && fs::metadata(path).is_ok_and(|metadata| metadata.len() == len)
    }

    /// Reads the description of the rows at `path`; `None` if it is missing or does not match the
    /// rows and `images`.
    fn read(path: &Path, images: &ImageSet) -> Option<Self> {
        let entry: Self = serde_json::from_slice(&fs::read(path.with_extension("json")).ok()?).ok()?;
        if entry.is_complete(path, images) { Some(entry) } else { None }
    }
}

impl FeatureCache {
    /// Returns a cache in `folder` of at most `max_bytes`. The entry written last stays even if it
    /// is larger.
    pub fn new(folder: PathBuf, max_bytes: u64) -> Self {
        Self { folder, max_bytes }
    }

    /// Returns the rows of `images` from the cache; extracts and stores them if they are absent.
    ///
    /// # Errors
    /// Errors of [`extract`], and [`EvalError::Io`].
    pub fn table(
        &self,
        network: &Network,
        images: &ImageSet,
        wanted: FeatureKind,
        progress: &dyn Progress,
    ) -> Result<Table, EvalError> {
        let name = entry_name(network, images, wanted)?;
        let rows = self.folder.join(format!("{name}.f32"));
        if let Some(table) = open(&rows, images) {
            return Ok(table);
        }
        fs::create_dir_all(&self.folder).map_err(|source| EvalError::io("create", &self.folder, source))?;
        // Processes in two containers that share the folder may have the same id.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let temporary = self.folder.join(format!("{name}.{}-{}.tmp", std::process::id(), now.as_nanos()));
        let file = File::create(&temporary).map_err(|source| EvalError::io("create", &temporary, source))?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        let mut indices = Vec::new();
        let mut hash = Xxh3::new();
        let columns = extract(network, images, wanted, progress, |batch, values| {
            indices.extend_from_slice(batch);
            hash.update(bytemuck::cast_slice(values));
            out.write_all(bytemuck::cast_slice(values))
                .map_err(|source| EvalError::io("write", &temporary, source))
        });
        let columns = columns.and_then(|columns| {
            sync_and_rename(&mut out, &temporary, &rows)?;
            Ok(columns)
        });
        if columns.is_err() {
            // A failed removal must not hide the first error.
            let _ = fs::remove_file(&temporary);
        }
        let columns = columns?;
        let decoded: std::collections::HashSet<u32> = indices.iter().copied().collect();
        let bad = (0..images.len() as u32).filter(|image| !decoded.contains(image)).collect();
        let n_rows = indices.len();
        let n_images = images.len();
        let checksum = String::new();
        let mut entry = CacheEntry { version: VERSION, columns, n_rows, bad, n_images, checksum };
        entry.checksum = entry.checksum(hash.digest());
        let json = rows.with_extension("json");
        let text = serde_json::to_vec(&entry).map_err(|error| EvalError::io("write", &json, error.into()))?;
        pipeline::file::replace(&json, &text).map_err(|source| EvalError::io("write", &json, source))?;
        let mapped = Mapped::open(&rows).map_err(|source| EvalError::io("map", &rows, source))?;
        self.evict(&name);
        Ok(Table::from_mapped(entry.columns, indices, mapped))
    }

    /// Returns whether the rows are cached.
    ///
    /// # Errors
    /// [`EvalError::Data`] if a shard cannot be read.
    pub fn holds(
        &self,
        network: &Network,
        images: &ImageSet,
        wanted: FeatureKind,
    ) -> Result<bool, EvalError> {
        let rows = self.folder.join(format!("{}.f32", entry_name(network, images, wanted)?));
        Ok(open(&rows, images).is_some())
    }

    /// Removes the least recently used entries, except `kept`, until the rest fits, and stale
    /// temporary files. Failures to remove are ignored.
    fn evict(&self, kept: &str) {
        let mut entries: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let Ok(metadata) = entry.metadata() else { continue };
            let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("f32") => entries.push((used, metadata.len(), path)),
                Some("tmp") if used.elapsed().is_ok_and(|age| age > STALE_AFTER) => {
                    drop(fs::remove_file(path))
                }
                _ => {}
            }
        }
        entries.sort();
        let mut total: u64 = entries.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, bytes, path) in entries {
            if total <= self.max_bytes {
                return;
            }
            if path.file_stem().is_some_and(|name| name != kept) {
                // Processes that have mapped the rows can still read them.
                let _ = fs::remove_file(path.with_extension("json"));
                let _ = fs::remove_file(&path);
                total -= bytes;
            }
        }
    }
}

/// Returns the file name of an entry, without its extension.
fn entry_name(network: &Network, images: &ImageSet, wanted: FeatureKind) -> Result<String, EvalError> {
    let about = format!("{VERSION} {:016x} {:016x} {wanted:?}", network.fingerprint(), images.fingerprint()?);
    Ok(format!("{:032x}", xxhash_rust::xxh3::xxh3_128(about.as_bytes())))
}

/// Opens the entry at `path` if it is complete and undamaged, and marks it as used now.
fn open(path: &Path, images: &ImageSet) -> Option<Table> {
    let entry = CacheEntry::read(path, images)?;
    let mapped = Mapped::open(path).ok()?;
    let rows = xxhash_rust::xxh3::xxh3_64(bytemuck::cast_slice(mapped.values()));
    if entry.checksum != entry.checksum(rows) {
        tracing::warn!("the cached features {} are damaged; computing them again", path.display());
        return None;
    }
    let bad: std::collections::HashSet<u32> = entry.bad.into_iter().collect();
    let indices: Vec<u32> = (0..entry.n_images as u32).filter(|image| !bad.contains(image)).collect();
    // The modification time records the last use. Failures are ignored: the cache may be read-only.
    let _ = File::options().append(true).open(path).and_then(|file| file.set_modified(SystemTime::now()));
    Some(Table::from_mapped(entry.columns, indices, mapped))
}

/// Completes the file `temporary`, which `out` writes, and renames it to `path`.
fn sync_and_rename(out: &mut BufWriter<File>, temporary: &Path, path: &Path) -> Result<(), EvalError> {
    out.flush()
        .and_then(|()| out.get_ref().sync_all())
        .map_err(|source| EvalError::io("write", temporary, source))?;
    fs::rename(temporary, path).map_err(|source| EvalError::io("rename", temporary, source))
}

/// Returns the rows of `images`, through the cache if there is one. If the cache cannot be read or
/// written, as on a full disk, the rows are computed and kept in memory only.
///
/// # Errors
/// Errors of [`extract`].
pub fn features(
    cache: Option<&FeatureCache>,
    network: &Network,
    images: &ImageSet,
    wanted: FeatureKind,
    progress: &dyn Progress,
) -> Result<Arc<Table>, EvalError> {
    let cached = cache.map(|cache| cache.table(network, images, wanted, progress));
    let table = match cached {
        Some(Err(error @ EvalError::Io { .. })) => {
            tracing::warn!("cannot cache features: {error}");
            table(network, images, wanted, progress)
        }
        Some(table) => table,
        None => table(network, images, wanted, progress),
    };
    let table = table?;
    if table.has_equal_rows() {
        tracing::warn!(
            "all {} images of {} have the same features: the images are equal, the network has collapsed, \
             or its weights are not set",
            table.len(),
            images.name
        );
    }
    Ok(Arc::new(table))
}
