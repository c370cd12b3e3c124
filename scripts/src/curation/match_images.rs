//! The images that rows of features are of, found by their names.

use std::collections::HashMap;
use std::path::Path;

use anyhow::bail;
use eval::features::file::ImageName;
use pipeline::{Dataset, SampleId};

/// Returns the sample of each of `names` in `dataset`: by shard and key, or by the key alone where it occurs once.
pub(super) fn matched(dataset: &Dataset, names: &[ImageName]) -> anyhow::Result<Vec<SampleId>> {
    let mut by_key: HashMap<String, Vec<SampleId>> = HashMap::new();
    for id in (0..dataset.n_samples()).map(SampleId) {
        let (shard, number) = dataset.locate(id);
        by_key.entry(shard.key(number).to_string()).or_default().push(id);
    }
    let find = |(row, name): (usize, &ImageName)| {
        let all = by_key.get(&name.key).or_else(|| by_key.get(without_extension(&name.key)));
        match all.map(Vec::as_slice) {
            None | Some([]) => bail!(
                "row {row} of the features is of {}, which is not among the images: they are features of other images",
                described(name)
            ),
            Some([one]) => Ok(*one),
            Some(several) => {
                let is_in = |id: &&SampleId| {
                    name.shard.as_deref().is_some_and(|shard| is_same(shard, &dataset.locate(**id).0.name()))
                };
                let found: Vec<&SampleId> = several.iter().filter(is_in).collect();
                match found.as_slice() {
                    [one] => Ok(**one),
                    _ => bail!(
                        "row {row} of the features is of {}, and {} of the images have this key: name the shards as they were \
                         named when the features were computed",
                        described(name),
                        several.len()
                    ),
                }
            }
        }
    };
    names.iter().enumerate().map(find).collect()
}

/// Returns the key that a file has as a sample.
fn without_extension(name: &str) -> &str {
    match name.rsplit_once('.') {
        Some((stem, extension)) if !extension.contains('/') => stem,
        _ => name,
    }
}

/// Returns whether two names of shards are those of the same file, perhaps in another folder.
fn is_same(a: &str, b: &str) -> bool {
    a == b || Path::new(a).file_name() == Path::new(b).file_name()
}

/// Returns shard and key in words.
pub(crate) fn described(name: &ImageName) -> String {
    match &name.shard {
        Some(shard) => format!("{} in {shard}", name.key),
        None => name.key.clone(),
    }
}
