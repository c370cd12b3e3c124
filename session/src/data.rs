//! Opening of the images of a recipe, with the shares and weights by which they are shown.

use std::path::Path;

use pipeline::secrets::redact_list;
use pipeline::source_name::{is_source_name, split_source};
use pipeline::url::{ShardUrl, expand};
use pipeline::words::thousands;
use pipeline::{Dataset, MixedSource, SampleId, Sampling, Storage};
use prep::column::Column;
use prep::open::{is_folder_of_images, open_dataset, open_shards};
use trainer::recipe::DataConfig;

use crate::error::SessionError;

/// Opens the images of `data`.
///
/// # Errors
/// [`SessionError`] when they cannot be opened, or shares and weights do not fit them.
pub fn open_sampled(data: &DataConfig, storage: &Storage) -> Result<Dataset, SessionError> {
    let mut sources = Vec::new();
    let dataset = if data.mix.is_empty() {
        reject_source_names(&data.shards)?;
        open_dataset(&data.shards, storage)?
    } else {
        let mut all_shards = Vec::new();
        for (name, specs) in named_specs(data)? {
            let shards = open_shards(&specs, storage)?;
            let share = data.mix[&name];
            sources.push(MixedSource { name, share, n_shards: shards.len() });
            all_shards.extend(shards);
        }
        Dataset::new(all_shards)?
    };
    let weights = match &data.weights {
        Some(path) => Some(image_weights(path, &dataset)?),
        None => None,
    };
    Ok(dataset.sampled(Sampling { sources, weights })?)
}

/// Opens the images of `data` if they are on a disk, and returns their paths with them: opening a
/// remote shard may fetch it. Paths are relative to `folder`, where the run was started.
///
/// # Errors
/// [`SessionError::RemoteShards`], and errors of shards that cannot be opened.
pub fn open_local(
    data: &DataConfig,
    folder: &Path,
    storage: &Storage,
) -> Result<(Dataset, Vec<String>), SessionError> {
    let mut paths = Vec::new();
    for spec in data.shard_lists() {
        let path = folder.join(&spec).to_string_lossy().into_owned();
        if is_folder_of_images(&path)? {
            paths.push(path);
            continue;
        }
        for shard in expand(&[spec])? {
            match shard {
                ShardUrl::File(path) => paths.push(folder.join(path).to_string_lossy().into_owned()),
                ShardUrl::Remote(_) | ShardUrl::Pipe(_) => return Err(SessionError::RemoteShards),
            }
        }
    }
    Ok((open_dataset(&paths, storage)?, paths))
}

/// Returns the shards of each source of the mix, by name.
fn named_specs(data: &DataConfig) -> Result<Vec<(String, Vec<String>)>, SessionError> {
    let mut sources: Vec<(String, Vec<String>)> =
        data.mix.keys().map(|name| (name.clone(), Vec::new())).collect();
    if let Some(name) = data.mix.keys().find(|name| !is_source_name(name)) {
        let reason = format!("data.mix.{name}: the name of a source may have only letters, digits, _ and -");
        return Err(SessionError::Sources { reason });
    }
    for spec in &data.shards {
        if let Some((name, shards)) = split_source(spec)
            && let Some((_, specs)) = sources.iter_mut().find(|(source, _)| source == name)
        {
            specs.push(shards.to_string());
            continue;
        }
        let known = data.mix.keys().cloned().collect::<Vec<_>>().join(", ");
        let reason = format!(
            "--shards {}: data.mix has the sources {known}: name one, as in NAME=SHARDS",
            redact_list(spec)
        );
        return Err(SessionError::Sources { reason });
    }
    if let Some((name, _)) = sources.iter().find(|(_, specs)| specs.is_empty()) {
        let reason = format!("data.mix has a source {name} without shards: give --shards {name}=FOLDER");
        return Err(SessionError::Sources { reason });
    }
    Ok(sources)
}

/// Rejects shards with names of sources if the recipe gives no shares.
fn reject_source_names(specs: &[String]) -> Result<(), SessionError> {
    for spec in specs {
        if let Some((name, rest)) = split_source(spec)
            && !Path::new(spec).exists()
            && Path::new(rest).exists()
        {
            let reason = format!(
                "--shards {spec}: give the shares of the sources too, as in --set data.mix.{name}=0.5"
            );
            return Err(SessionError::Sources { reason });
        }
    }
    Ok(())
}

/// Reads the weight of each sample of `dataset`; 0 for one that is not in the list.
fn image_weights(path: &Path, dataset: &Dataset) -> Result<Vec<f64>, SessionError> {
    let list = Column::read(path, "weight")?;
    let mut weights = Vec::with_capacity(dataset.n_samples() as usize);
    let mut n_unlisted = 0u64;
    for id in (0..dataset.n_samples()).map(SampleId) {
        let (shard, index) = dataset.locate(id);
        let name = shard.name();
        let key = shard.key(index);
        let weight = match list.value(Some(&name), key)? {
            Some(text) => text.parse::<f64>().map_err(|_| SessionError::ImageWeight {
                path: path.to_path_buf(),
                key: key.to_string(),
                text: text.to_string(),
            })?,
            None => {
                n_unlisted += 1;
                0.0
            }
        };
        weights.push(weight);
    }
    if n_unlisted > 0 && n_unlisted < dataset.n_samples() {
        tracing::info!(
            "{} of {} images are not in {}, and are not shown",
            thousands(n_unlisted),
            thousands(dataset.n_samples()),
            path.display()
        );
    }
    if n_unlisted == dataset.n_samples() {
        return Err(SessionError::NoImageWeights { path: path.to_path_buf() });
    }
    Ok(weights)
}
