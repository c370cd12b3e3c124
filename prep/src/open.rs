//! Opening of shards, and of folders of images that are read in place, as one data set.

use std::path::{Path, PathBuf};

use augment::DecodeRules;
use augment::facts::facts;
use pipeline::shard::IMAGE_EXTENSIONS;
use pipeline::shard::files::{ImageFile, shard_from_files};
use pipeline::url::{is_parquet, is_shard};
use pipeline::words::counted;
use pipeline::{ColumnNames, Dataset, PipelineError, Shard, Source, Storage};

use crate::error::PrepError;
use crate::files::{extension, extensions, find_images, is_hidden, is_image, name_of, report_skipped};
use crate::keys::Keys;
use crate::order::shuffle;

/// Number of images of a folder that are read as one shard, so small that a small folder yields
/// several, among which samples are shuffled.
const FILES_PER_SHARD: usize = 2_000;

/// Number of images whose headers are read to check for an EXIF orientation.
const HEADERS_READ: u64 = 200;

/// Opens the shards that `specs` name, and the images of folders among them.
///
/// # Errors
/// [`PrepError`] when one of them cannot be opened.
pub fn open_dataset(specs: &[String], storage: &Storage) -> Result<Dataset, PrepError> {
    Ok(Dataset::new(open_shards(specs, storage)?)?)
}

/// Opens the shards that `specs` name, and shards of the images of folders among them.
///
/// # Errors
/// [`PrepError`] when one of them cannot be opened.
pub fn open_shards(specs: &[String], storage: &Storage) -> Result<Vec<Shard>, PrepError> {
    let mut shards = Vec::new();
    for spec in specs {
        if is_folder_of_images(spec)? {
            storage.warn_unused_columns(spec);
            shards.extend(folder_as_shards(spec)?);
        } else {
            let sources = storage.sources(std::slice::from_ref(spec))?;
            shards.extend(storage.open_all(&sources)?);
        }
    }
    Ok(shards)
}

/// Opens the shards that `specs` name, the images of folders among them, and images that are single
/// files, as queries are.
///
/// # Errors
/// [`PrepError`] when one of them cannot be opened.
pub fn open_with_files(specs: &[String], storage: &Storage) -> Result<Dataset, PrepError> {
    let mut files = Vec::new();
    let mut others = Vec::new();
    for spec in specs {
        if is_file(spec) {
            files.push(spec.clone());
        } else {
            others.push(spec.clone());
        }
    }
    let mut shards = open_shards(&others, storage)?;
    if !files.is_empty() {
        shards.push(files_as_shard(&files)?);
    }
    Ok(Dataset::new(shards)?)
}

/// Returns whether `spec` is an image in a file of its own.
pub fn is_file(spec: &str) -> bool {
    let path = Path::new(spec);
    path.is_file() && readable_extension(path).is_some()
}

/// Returns the images in `files` as a shard.
fn files_as_shard(files: &[String]) -> Result<Shard, PrepError> {
    let mut keys = Keys::default();
    let mut images = Vec::new();
    for file in files {
        let path = PathBuf::from(file);
        let Some(extension) = readable_extension(&path) else { continue };
        let name = name_of(Path::new(path.file_name().unwrap_or(path.as_os_str())));
        images.push(ImageFile { key: keys.unique(&name), extension, path, class: None, mask: None });
    }
    Ok(shard_from_files("images", &images)?)
}

/// Arguments of a command: shards, and folders of images.
pub struct Inputs {
    /// Shards, as they were given.
    pub shards: Vec<String>,
    /// Folders of images.
    pub folders: Vec<String>,
}

/// Separates the folders of images among `specs` from shards.
///
/// # Errors
/// [`PrepError::Io`].
pub fn split_folders(specs: &[String]) -> Result<Inputs, PrepError> {
    let mut inputs = Inputs { shards: Vec::new(), folders: Vec::new() };
    for spec in specs {
        if is_folder_of_images(spec)? {
            inputs.folders.push(spec.clone());
        } else {
            inputs.shards.push(spec.clone());
        }
    }
    Ok(inputs)
}

impl Inputs {
    /// Returns the shards by name, and none if there are only folders.
    ///
    /// # Errors
    /// [`PrepError::Data`].
    pub fn sources(&self, storage: &Storage) -> Result<Vec<Source>, PrepError> {
        if let Some(folder) = self.folders.first() {
            storage.warn_unused_columns(folder);
        }
        if self.shards.is_empty() {
            return Ok(Vec::new());
        }
        Ok(storage.sources(&self.shards)?)
    }

    /// Opens the images of the folders.
    ///
    /// # Errors
    /// [`PrepError`] when a folder cannot be read or has no images.
    pub fn open_folders(&self) -> Result<Vec<Shard>, PrepError> {
        let mut shards = Vec::new();
        for folder in &self.folders {
            shards.extend(folder_as_shards(folder)?);
        }
        Ok(shards)
    }
}

/// Returns `true` if `spec` is a folder with images in it or below it, and no shard or Parquet file
/// in it.
///
/// # Errors
/// [`PrepError::Io`].
pub fn is_folder_of_images(spec: &str) -> Result<bool, PrepError> {
    let folder = Path::new(spec);
    if !folder.is_dir() {
        return Ok(false);
    }
    let entries = std::fs::read_dir(folder).map_err(|error| PrepError::io("read", folder, error))?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    if paths.any(|path| is_shard(&path) || is_parquet(&path)) {
        return Ok(false);
    }
    let files = walkdir::WalkDir::new(folder).follow_links(true).into_iter();
    let mut visible = files.filter_entry(|entry| entry.depth() == 0 || !is_hidden(entry.path())).flatten();
    Ok(visible.any(|file| is_image(file.path())))
}

/// Returns the images of the folder `spec` in the order in which `shards pack` would write them.
fn folder_as_shards(spec: &str) -> Result<Vec<Shard>, PrepError> {
    let folder = Path::new(spec);
    // Pictures of a run are no images to train on.
    if folder.join("plan.toml").is_file() && folder.join("checkpoints").is_dir() {
        return Err(PrepError::WorkDirectory { path: folder.to_path_buf() });
    }
    let images = find_images(Path::new(spec), &ColumnNames::default())?;
    report_skipped(&images.skipped);
    let mut keys = Keys::default();
    let mut files = Vec::new();
    let mut others = Vec::new();
    for entry in images.entries {
        let key = keys.unique(&entry.name);
        match readable_extension(&entry.path) {
            Some(extension) => {
                let class = entry.classes.map(|classes| classes.join("\n"));
                files.push(ImageFile { key, extension, path: entry.path, class, mask: entry.mask });
            }
            None => others.push(entry.name),
        }
    }
    if let Some(first) = others.first() {
        tracing::warn!(
            "{spec}: skipped {} of a format that only `ocelli shards pack` reads, such as {first}",
            counted(others.len() as u64, "image")
        );
    }
    if files.is_empty() {
        let wanted = extensions().collect::<Vec<_>>().join(", ");
        return Err(PipelineError::NoImages { path: spec.into(), wanted }.into());
    }
    shuffle(&mut files, 0);
    let mut shards = Vec::new();
    for files in files.chunks(FILES_PER_SHARD) {
        shards.push(shard_from_files(spec, files)?);
    }
    Ok(shards)
}

/// Returns the extension under which the loader finds the image at `path`; `None` if it cannot read
/// the format in place.
fn readable_extension(path: &Path) -> Option<String> {
    match extension(path)?.as_str() {
        "dib" => Some("bmp".into()),
        extension => IMAGE_EXTENSIONS.contains(&extension).then(|| extension.into()),
    }
}

/// Reports how many of a few images of `dataset` have an EXIF orientation that is not applied.
/// Shards on a server are not fetched for this.
pub fn report_turned(dataset: &Dataset, rules: &DecodeRules) {
    if rules.apply_exif || !dataset.is_local() {
        return;
    }
    let n_read = dataset.n_samples().min(HEADERS_READ);
    let mut n_turned = 0;
    for id in dataset.spread(HEADERS_READ) {
        // Samples that cannot be read are reported where they are used.
        let Ok(sample) = dataset.read(id) else { continue };
        let files = sample.image.files();
        if files.iter().any(|file| facts(file).is_ok_and(|facts| facts.turned)) {
            n_turned += 1;
        }
    }
    if n_turned > 0 {
        tracing::info!(
            "{n_turned} of {} {} turned by EXIF data, which is not applied, as in published recipes; to \
             apply it, add --set data.apply_exif=true",
            counted(n_read, "inspected image"),
            if n_turned == 1 { "is" } else { "are" }
        );
    }
}
