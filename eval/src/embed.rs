//! Files of the features of a set of images, for other programs.
//!
//! A job may be done in parts, each of which is a file of its own, such as `x-00001-of-00004.npy`.
//! The description in it names the network, the images and the kind of features, so that a part is
//! kept or joined only if its features are what the job asks for.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use networks::Network;
use pipeline::Progress;
use prep::folder_lock::{FolderLock, lock_part};
use prep::parts::{Part, Work, check_none_missing};
use serde_json::{Value, json};
use xxhash_rust::xxh3::Xxh3;

use crate::EvalError;
use crate::features::cache::{FeatureCache, features};
use crate::features::columns::{Columns, FeatureKind};
use crate::features::file::{FeatureFile, Format, export_files, read, write};
use crate::features::table::Table;
use crate::images::ImageSet;
use crate::row::NetworkInfo;

/// A file of features to write.
#[derive(Debug, Clone)]
pub struct EmbedJob {
    /// The file of all images.
    pub out: PathBuf,
    /// Format of the file.
    pub format: Format,
    /// Features of an image.
    pub kind: FeatureKind,
    /// Share of the job that this process does.
    pub work: Work,
    /// Rank of this process; each rank of a launcher computes a part of a whole job.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Whether existing files are replaced.
    pub overwrites: bool,
}

/// A file of features that was written.
#[derive(Debug, Clone)]
pub struct Embedded {
    /// Images of the file.
    pub images: ImageSet,
    /// Rows of the file.
    pub table: Arc<Table>,
    /// Whether the rows were in the cache.
    pub is_cached: bool,
    /// Seconds in which the rows were computed, found in the cache or joined.
    pub seconds: f64,
}

impl Embedded {
    /// Returns the indices of the images that have no row.
    pub fn missing(&self) -> Vec<usize> {
        let present: HashSet<u32> = self.table.images.iter().copied().collect();
        (0..self.images.len()).filter(|index| !present.contains(&(*index as u32))).collect()
    }
}

impl EmbedJob {
    /// Returns the rank of the part that this process computes, and the number of parts.
    fn place(&self) -> (usize, usize) {
        match self.work {
            Work::Part(part) => part.rank(),
            Work::Whole | Work::Join(_) => (self.rank, self.world_size),
        }
    }

    /// Returns the file that this process writes: the file of its part, or of all images.
    pub fn path(&self) -> PathBuf {
        let (rank, n_parts) = self.place();
        self.part_path(rank, n_parts)
    }

    /// Returns the path of a part's file, such as `x-00001-of-00004.npy`.
    fn part_path(&self, rank: usize, n_parts: usize) -> PathBuf {
        if n_parts == 1 {
            return self.out.clone();
        }
        let stem = self.out.file_stem().unwrap_or_default();
        let extension = self.out.extension().unwrap_or_default();
        let name =
            format!("{}-{rank:05}-of-{n_parts:05}.{}", stem.to_string_lossy(), extension.to_string_lossy());
        self.out.with_file_name(name)
    }

    /// Checks that no file exists, unless files may be overwritten, and creates the folder of the
    /// output. An existing part is no error here: [`EmbedJob::run`] compares it with the job, once
    /// network and images are known.
    ///
    /// # Errors
    /// [`EvalError::Exists`] and [`EvalError::Io`].
    pub fn prepare(&self) -> Result<(), EvalError> {
        let out = self.path();
        if !self.overwrites && !matches!(self.work, Work::Part(_)) {
            let existing = export_files(&out, self.format).into_iter().find(|path| path.exists());
            if let Some(path) = existing {
                return Err(EvalError::Exists { path });
            }
        }
        pipeline::file::create_parent(&out)
            .map_err(|source| EvalError::io("create the folder of", &out, source))
    }

    /// Computes the features of `images`, or of this part of them, by `network`, and writes the
    /// file; or joins the files of all parts. `about` describes the network. Returns `None` if this
    /// part exists.
    ///
    /// # Errors
    /// [`EvalError`] when images or parts cannot be read, parts are missing or of another job, or
    /// the file cannot be written.
    pub fn run(
        &self,
        network: &Network,
        images: ImageSet,
        about: &NetworkInfo,
        cache: Option<&FeatureCache>,
        progress: &dyn Progress,
    ) -> Result<Option<Embedded>, EvalError> {
        let (rank, n_parts) = self.place();
        if images.len() < n_parts {
            return Err(EvalError::TooManyParts { n_images: images.len(), n_parts });
        }
        if images.is_multi_label() && self.rank == 0 {
            tracing::warn!(
                "images of {} have several classes: the label and the class of a row are the first of them",
                images.name
            );
        }
        let mut description = self.describe(about, &images)?;
        if let Work::Join(n_parts) = self.work {
            return self.join(images, description, n_parts).map(Some);
        }
        let _lock = self.lock()?;
        let images = images.part_of_rank(rank, n_parts);
        let out = self.path();
        if !self.overwrites && matches!(self.work, Work::Part(_)) && out.exists() {
            check_description(&out, &read(&out)?, &description)?;
            return Ok(None);
        }
        let start = Instant::now();
        let is_cached = match cache {
            Some(cache) => cache.holds(network, &images, self.kind)?,
            None => false,
        };
        let table = features(cache, network, &images, self.kind, progress)?;
        let seconds = start.elapsed().as_secs_f64();
        description["columns"] = json!(table.columns);
        if out.exists() {
            // If the program is stopped between the two writes, the new list of images must not be
            // beside the old features.
            fs::remove_file(&out).map_err(|source| EvalError::io("remove", &out, source))?;
        }
        write(&out, self.format, &table, &images, &description)?;
        Ok(Some(Embedded { images, table, is_cached, seconds }))
    }

    /// Describes the features of `images`, except for their columns.
    fn describe(&self, about: &NetworkInfo, images: &ImageSet) -> Result<Value, EvalError> {
        let mut description = json!(about);
        description["images"] = json!(images.name);
        description["features"] = json!(self.kind);
        description["classes"] = json!(images.classes());
        description["set"] = json!(set_identity(images)?);
        if let Some(decoding) = images.unusual_decoding() {
            description["decoding"] = json!(decoding);
        }
        Ok(description)
    }

    /// Locks the part that this process writes, if it writes a part.
    fn lock(&self) -> Result<Option<FolderLock>, EvalError> {
        let Work::Part(part) = self.work else { return Ok(None) };
        let folder = self.out.parent().filter(|folder| !folder.as_os_str().is_empty());
        let name = self.out.file_name().unwrap_or_default().to_string_lossy();
        Ok(Some(lock_part(folder.unwrap_or(Path::new(".")), &name, part)?))
    }

    /// Writes the rows of `n_parts` files, which are all of `images`, to one file.
    fn join(&self, images: ImageSet, mut description: Value, n_parts: usize) -> Result<Embedded, EvalError> {
        let start = Instant::now();
        let missing: Vec<Part> =
            Part::all(n_parts).filter(|part| !self.part_path(part.rank().0, n_parts).exists()).collect();
        check_none_missing(&missing)?;
        let mut indices = Vec::new();
        let mut rows = Vec::new();
        let mut columns = None;
        for part in Part::all(n_parts) {
            let path = self.part_path(part.rank().0, n_parts);
            let file = read(&path)?;
            check_description(&path, &file, &description)?;
            let part_columns: Columns = serde_json::from_value(file.about["columns"].clone())
                .map_err(|source| EvalError::NoColumns { path: path.clone(), source })?;
            columns.get_or_insert(part_columns);
            let mut names = file.images.into_iter().flatten().peekable();
            for index in part.range(images.len()) {
                let (shard, key) = images.describe(index);
                // An image that could not be decoded has no row.
                if names.next_if(|name| name.shard == shard && name.key == key).is_some() {
                    indices.push(index as u32);
                }
            }
            if let Some(name) = names.next() {
                return Err(EvalError::OtherRow { path, key: name.key });
            }
            rows.extend_from_slice(file.table.rows());
        }
        let columns = columns.ok_or(EvalError::NoParts)?;
        description["columns"] = json!(columns);
        let table = Arc::new(Table::new(columns, indices, rows));
        write(&self.out, self.format, &table, &images, &description)?;
        Ok(Embedded { images, table, is_cached: false, seconds: start.elapsed().as_secs_f64() })
    }
}

/// Checks that the features in `file`, read from `path`, have this `description`.
fn check_description(path: &Path, file: &FeatureFile, description: &Value) -> Result<(), EvalError> {
    let mut existing = file.about.clone();
    if let Some(fields) = existing.as_object_mut() {
        fields.remove("columns");
    }
    if existing == *description { Ok(()) } else { Err(EvalError::OtherFeatures { path: path.to_path_buf() }) }
}

/// Identifies the images of a set: their number, and a hash of their names and contents.
fn set_identity(images: &ImageSet) -> Result<String, EvalError> {
    let mut hash = Xxh3::new();
    for index in 0..images.len() {
        let (shard, key) = images.describe(index);
        hash.update(json!([shard, key]).to_string().as_bytes());
    }
    hash.update(&images.recognition()?.to_le_bytes());
    Ok(format!("{} images, {:016x}", images.len(), hash.digest()))
}
