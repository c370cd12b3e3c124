//! Opening of shards, and of folders of images that are read in place, as one data set.

use std::path::Path;

use anyhow::{Context, bail};
use augment::DecodeRules;
use augment::facts::facts;
use pipeline::shard::IMAGE_EXTENSIONS;
use pipeline::shard::files::{ImageFile, of_files};
use pipeline::url::{is_parquet, is_shard};
use pipeline::{ColumnNames, Dataset, SampleId, Shard, Source, Storage};

use super::files::{SampleFile, entries, extensions, is_hidden, is_image, print_skipped};
use super::keys::Keys;
use super::order::shuffle;
use crate::console::say;
use crate::parts::Work;

/// Number of images of a folder that are read as one shard, so small that a small folder yields
/// several, among which samples are shuffled.
const FILES_PER_SHARD: usize = 2_000;

/// Number of images whose headers are read to find out whether EXIF turns them.
const HEADERS_READ: u64 = 200;

/// Opens the shards that `specs` name, and the images of folders among them.
pub(crate) fn open_dataset(specs: &[String], storage: &Storage) -> anyhow::Result<Dataset> {
    Ok(Dataset::new(open_shards(specs, storage)?)?)
}

/// Opens the shards that `specs` name, and shards of the images of folders among them.
pub(crate) fn open_shards(specs: &[String], storage: &Storage) -> anyhow::Result<Vec<Shard>> {
    let mut shards = Vec::new();
    for spec in specs {
        if is_folder_of_images(spec)? {
            shards.extend(shards_of_folder(spec)?)
        } else {
            shards.extend(storage.open_all(&storage.sources(std::slice::from_ref(spec))?)?)
        }
    }
    Ok(shards)
}

/// Arguments of a command: shards, and folders of images.
pub(crate) struct Given {
    pub(crate) shards: Vec<String>,
    pub(crate) folders: Vec<String>,
}

/// Tells the folders of images among `specs` from shards.
pub(crate) fn split_folders(specs: &[String]) -> anyhow::Result<Given> {
    let mut given = Given { shards: Vec::new(), folders: Vec::new() };
    for spec in specs {
        if is_folder_of_images(spec)? {
            given.folders.push(spec.clone());
        } else {
            given.shards.push(spec.clone());
        }
    }
    Ok(given)
}

impl Given {
    /// Returns the shards by name, and none if there are only folders.
    pub(crate) fn sources(&self, storage: &Storage) -> anyhow::Result<Vec<Source>> {
        if self.shards.is_empty() {
            return Ok(Vec::new());
        }
        Ok(storage.sources(&self.shards)?)
    }

    /// Opens the images of the folders, for `work`, of which parts are made of shards alone.
    pub(crate) fn open_folders(&self, work: Work) -> anyhow::Result<Vec<Shard>> {
        if let (Some(folder), Work::Part(_) | Work::Join(_)) = (self.folders.first(), work) {
            bail!("{folder} is a folder of images, which is not divided into parts: pack it, or do it whole");
        }
        let mut shards = Vec::new();
        for folder in &self.folders {
            shards.extend(shards_of_folder(folder)?);
        }
        Ok(shards)
    }
}

/// Returns `true` if `spec` is a folder with images in it or below it, and no shard or Parquet file
/// in it.
pub(crate) fn is_folder_of_images(spec: &str) -> anyhow::Result<bool> {
    let folder = Path::new(spec);
    if !folder.is_dir() {
        return Ok(false);
    }
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {spec}"))?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    if paths.any(|path| is_shard(&path) || is_parquet(&path)) {
        return Ok(false);
    }
    let files = walkdir::WalkDir::new(folder).follow_links(true).into_iter();
    let mut visible = files.filter_entry(|entry| entry.depth() == 0 || !is_hidden(entry.path())).flatten();
    Ok(visible.any(|file| is_image(file.path())))
}

/// Returns the images of the folder `spec` in the order in which `shards pack` would write them.
fn shards_of_folder(spec: &str) -> anyhow::Result<Vec<Shard>> {
    let found = entries(Path::new(spec), &ColumnNames::default())?;
    print_skipped(&found.skipped);
    let mut keys = Keys::default();
    let mut files = Vec::new();
    let mut others = Vec::new();
    for entry in found.entries {
        let key = keys.of(&entry.name);
        match extension_of(&entry) {
            Some(extension) => files.push(ImageFile { key, extension, path: entry.path, class: entry.class }),
            None => others.push(entry.name),
        }
    }
    if let Some(first) = others.first() {
        say(format!(
            "warning: {spec}: {} images are of formats that only `ocelli shards pack` reads, such as {first}: skipped",
            others.len()
        ));
    }
    if files.is_empty() {
        bail!(pipeline::PipelineError::NoImages {
            path: spec.into(),
            wanted: extensions().collect::<Vec<_>>().join(", "),
        });
    }
    shuffle(&mut files, 0);
    files.chunks(FILES_PER_SHARD).map(|files| Ok(of_files(spec, files)?)).collect()
}

/// Extension under which the loader finds the image; `None` if it cannot read the format in place.
fn extension_of(entry: &SampleFile) -> Option<String> {
    match super::files::extension(&entry.path)?.as_str() {
        "dib" => Some("bmp".into()),
        extension => IMAGE_EXTENSIONS.contains(&extension).then(|| extension.into()),
    }
}

/// Prints a note if images of `dataset` carry an EXIF orientation that is not applied: as many
/// images as say it among some of them. Shards on a server are not fetched for it.
pub(crate) fn note_turned(dataset: &Dataset, rules: &DecodeRules) {
    if rules.apply_exif || !dataset.is_local() {
        return;
    }
    let n = dataset.n_samples();
    let n_read = n.min(HEADERS_READ);
    let is_turned = |number: u64| {
        let sample = dataset.read(SampleId(number * n / n_read.max(1)));
        sample.is_ok_and(|sample| {
            sample.image.files().iter().any(|file| facts(file).is_ok_and(|facts| facts.turned))
        })
    };
    let n_turned = (0..n_read).filter(|number| is_turned(*number)).count();
    if n_turned > 0 {
        say(format!(
            "note: EXIF turns {n_turned} of {n_read} images that were looked at, and this is not applied, as in published \
             recipes; --set data.apply_exif=true applies it"
        ));
    }
}
