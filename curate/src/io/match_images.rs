//! Matching of rows of features to images, by their names.

use std::collections::HashMap;
use std::path::Path;

use eval::features::file::ImageName;
use pipeline::secrets::redact_list;
use pipeline::{Dataset, SampleId};
use prep::files::name_of;
use prep::keys::Keys;

use crate::CurateError;

/// Returns the sample of each of `names` in `dataset`, the shards and folders `specs`: by shard and
/// key, or, where a name has no shard, by the file with this name within a folder. Names of files
/// whose folder was packed later are matched to the keys that were made from them.
///
/// # Errors
/// [`CurateError::UnknownImage`] and [`CurateError::AmbiguousImage`].
pub(super) fn match_images(
    dataset: &Dataset,
    specs: &[String],
    names: &[ImageName],
) -> Result<Vec<SampleId>, CurateError> {
    let mut by_key: HashMap<String, Vec<SampleId>> = HashMap::new();
    let mut by_file: HashMap<String, Vec<SampleId>> = HashMap::new();
    for id in (0..dataset.n_samples()).map(SampleId) {
        let (shard, index) = dataset.locate(id);
        by_key.entry(shard.key(index).to_string()).or_default().push(id);
        if let Some(file) = shard.single_file(index) {
            let name = file.strip_prefix(shard.name()).unwrap_or(file);
            by_file.entry(name_of(name)).or_default().push(id);
        }
    }
    let mut keys = Keys::default();
    let mut samples = Vec::with_capacity(names.len());
    for (row, name) in names.iter().enumerate() {
        let candidates = match &name.shard {
            Some(shard) => select_by_shard(dataset, by_key.get(&name.key), shard),
            None => {
                // Keys of files with the same stem are numbered in the order of the files.
                let key = keys.unique(&name.key);
                let file = by_file.get(&name.key);
                file.or_else(|| by_key.get(&name.key))
                    .or_else(|| by_key.get(&key))
                    .cloned()
                    .unwrap_or_default()
            }
        };
        if let [sample] = candidates.as_slice() {
            samples.push(*sample);
            continue;
        }
        let shards = redact_list(&specs.join(" "));
        let image = describe(name);
        if candidates.is_empty() {
            return Err(CurateError::UnknownImage { shards, row, image });
        }
        return Err(CurateError::AmbiguousImage { shards, row, image, n_images: candidates.len() });
    }
    Ok(samples)
}

/// Returns the `samples` in the shard named `shard`; if there are none, those in shards with the
/// same file name.
fn select_by_shard(dataset: &Dataset, samples: Option<&Vec<SampleId>>, shard: &str) -> Vec<SampleId> {
    let mut same_name = Vec::new();
    let mut same_file = Vec::new();
    for id in samples.into_iter().flatten() {
        let name = dataset.locate(*id).0.name();
        if name == shard {
            same_name.push(*id);
        }
        if is_same_file(shard, &name) {
            same_file.push(*id);
        }
    }
    if same_name.is_empty() { same_file } else { same_name }
}

/// Returns whether two paths of shards have the same file name, perhaps in different folders.
fn is_same_file(a: &str, b: &str) -> bool {
    Path::new(a).file_name() == Path::new(b).file_name()
}

/// Describes an image by its key and shard.
fn describe(name: &ImageName) -> String {
    match &name.shard {
        Some(shard) => format!("{} in {shard}", name.key),
        None => name.key.clone(),
    }
}

#[cfg(test)]
mod tests {
    use pipeline::{Storage, StorageConfig};
    use prep::open::open_dataset;

    use super::*;

    /// Files of a folder are matched by their names, whichever rows there are, although files with
    /// the same stem have numbered keys.
    #[test]
    fn files_with_the_same_stem_are_matched_by_name() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("cats")).unwrap();
        let files = ["cats/a.jpg", "cats/a.png", "cats/b.png"];
        for file in files {
            std::fs::write(folder.path().join(file), file).unwrap();
        }
        let spec = folder.path().display().to_string();
        let storage = Storage::new(StorageConfig::new(folder.path().join("cache")));
        let dataset = open_dataset(std::slice::from_ref(&spec), &storage).unwrap();
        let mut names = Vec::new();
        for file in ["cats/b.png", "cats/a.png"] {
            names.push(ImageName { shard: None, key: file.into(), label: None, class: None });
        }
        let samples = match_images(&dataset, &[spec], &names).unwrap();
        for (sample, name) in samples.iter().zip(&names) {
            let (shard, index) = dataset.locate(*sample);
            assert_eq!(shard.image(index).unwrap().bytes(), name.key.as_bytes());
        }
    }
}
