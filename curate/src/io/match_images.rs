//! Matching of rows of features to images, by their names.

use std::collections::HashMap;
use std::path::Path;

use eval::features::file::ImageName;
use pipeline::secrets::redact_list;
use pipeline::{Dataset, SampleId};
use prep::keys::Keys;

use crate::CurateError;

/// Returns the sample of each of `names` in `dataset`, the shards and folders `specs`: by key, and
/// by shard where a name has one. Names without a shard may be files of a folder, whose keys are
/// made from them.
///
/// # Errors
/// [`CurateError::UnknownImage`] and [`CurateError::AmbiguousImage`].
pub(super) fn match_images(
    dataset: &Dataset,
    specs: &[String],
    names: &[ImageName],
) -> Result<Vec<SampleId>, CurateError> {
    let mut by_key: HashMap<String, Vec<SampleId>> = HashMap::new();
    for id in (0..dataset.n_samples()).map(SampleId) {
        let (shard, index) = dataset.locate(id);
        by_key.entry(shard.key(index).to_string()).or_default().push(id);
    }
    let mut keys = Keys::default();
    let mut samples = Vec::with_capacity(names.len());
    for (row, name) in names.iter().enumerate() {
        let candidates = match &name.shard {
            Some(shard) => select_by_shard(dataset, by_key.get(&name.key), shard),
            None => {
                // Keys are numbered in the order of the files, as they were when the folder was
                // opened.
                let key = keys.unique(&name.key);
                by_key.get(&name.key).or_else(|| by_key.get(&key)).cloned().unwrap_or_default()
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
