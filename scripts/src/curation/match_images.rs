//! The images that rows of features are of, found by their names.

use std::collections::HashMap;
use std::path::Path;

use anyhow::bail;
use eval::features::file::ImageName;
use pipeline::{Dataset, SampleId};

use prep::keys::Keys;

/// Returns the sample of each of `names` in `dataset`: by key, and by shard where a name has one.
/// Names without a shard may be files of a folder, whose keys are made from them.
pub(super) fn matched(dataset: &Dataset, names: &[ImageName]) -> anyhow::Result<Vec<SampleId>> {
    let mut by_key: HashMap<String, Vec<SampleId>> = HashMap::new();
    for id in (0..dataset.n_samples()).map(SampleId) {
        let (shard, number) = dataset.locate(id);
        by_key.entry(shard.key(number).to_string()).or_default().push(id);
    }
    let mut keys = Keys::default();
    let mut found = Vec::with_capacity(names.len());
    for (row, name) in names.iter().enumerate() {
        let candidates = match &name.shard {
            Some(shard) => of_shard(dataset, by_key.get(&name.key), shard),
            None => {
                // Keys are numbered in the order of the files, as they were when the folder was
                // opened.
                let key = keys.unique(&name.key);
                by_key.get(&name.key).or_else(|| by_key.get(&key)).cloned().unwrap_or_default()
            }
        };
        match candidates.as_slice() {
            [one] => found.push(*one),
            [] => bail!(
                "row {row} of the features is of {}, which is not among the images: they are features of other images",
                described(name)
            ),
            several => bail!(
                "row {row} of the features is of {}, and {} of the images are called so: name the shards as they were named when the \
                 features were computed",
                described(name),
                several.len()
            ),
        }
    }
    Ok(found)
}

/// Returns the samples that are in `shard`, as it is named, or else in shards with the same file
/// name.
fn of_shard(dataset: &Dataset, samples: Option<&Vec<SampleId>>, shard: &str) -> Vec<SampleId> {
    let is_in = |id: &&SampleId, is_same: &dyn Fn(&str) -> bool| is_same(&dataset.locate(**id).0.name());
    let all = samples.map(Vec::as_slice).unwrap_or_default();
    let exact: Vec<SampleId> = all.iter().filter(|id| is_in(id, &|name| name == shard)).copied().collect();
    if exact.is_empty() {
        all.iter().filter(|id| is_in(id, &|name| is_same_file(shard, name))).copied().collect()
    } else {
        exact
    }
}

/// Returns whether two names of shards are those of the same file, perhaps in another folder.
fn is_same_file(a: &str, b: &str) -> bool {
    Path::new(a).file_name() == Path::new(b).file_name()
}

/// Returns shard and key in words.
pub(crate) fn described(name: &ImageName) -> String {
    match &name.shard {
        Some(shard) => format!("{} in {shard}", name.key),
        None => name.key.clone(),
    }
}
