//! Opening of the images of a recipe, with the shares and weights by which they are shown.

use std::path::Path;

use anyhow::bail;
use pipeline::secrets::redact_list;
use pipeline::source_name::{is_source_name, split_source};
use pipeline::{Dataset, MixedSource, SampleId, Sampling, Storage};
use trainer::recipe::DataConfig;

use super::column::Column;
use super::open::{open_dataset, open_shards};
use crate::console::say;

/// Opens the images of `data`.
pub(crate) fn open_sampled(data: &DataConfig, storage: &Storage) -> anyhow::Result<Dataset> {
    let (dataset, sources) = if data.mix.is_empty() {
        refuse_names(&data.shards)?;
        (open_dataset(&data.shards, storage)?, Vec::new())
    } else {
        let mut shards = Vec::new();
        let mut sources = Vec::new();
        for (name, specs) in named_specs(data)? {
            let of_source = open_shards(&specs, storage)?;
            sources.push(MixedSource {
                name: name.clone(),
                share: data.mix[&name],
                n_shards: of_source.len(),
            });
            shards.extend(of_source);
        }
        (Dataset::new(shards)?, sources)
    };
    let weights = data.weights.as_deref().map(|path| weights(path, &dataset)).transpose()?;
    Ok(dataset.sampled(Sampling { sources, weights })?)
}

/// Returns the shards of each source of the mix, by name.
fn named_specs(data: &DataConfig) -> anyhow::Result<Vec<(String, Vec<String>)>> {
    let mut found: Vec<(String, Vec<String>)> =
        data.mix.keys().map(|name| (name.clone(), Vec::new())).collect();
    if let Some(name) = data.mix.keys().find(|name| !is_source_name(name)) {
        bail!("data.mix.{name}: the name of a source has letters, digits, _ and - only");
    }
    for spec in &data.shards {
        let named = split_source(spec).and_then(|(name, rest)| {
            let source = found.iter_mut().find(|(known, _)| known == name)?;
            Some((source, rest.to_string()))
        });
        match named {
            Some((source, rest)) => source.1.push(rest),
            None => {
                let known = data.mix.keys().cloned().collect::<Vec<_>>().join(", ");
                bail!(
                    "--shards {}: data.mix has the sources {known}: name one, as in NAME=SHARDS",
                    redact_list(spec)
                )
            }
        }
    }
    match found.iter().find(|(_, specs)| specs.is_empty()) {
        Some((name, _)) => bail!("data.mix has a source {name} without shards: give --shards {name}=FOLDER"),
        None => Ok(found),
    }
}

/// Refuses shards with names of sources where the recipe gives no shares.
fn refuse_names(specs: &[String]) -> anyhow::Result<()> {
    for spec in specs {
        let named =
            split_source(spec).filter(|(_, rest)| !Path::new(spec).exists() && Path::new(rest).exists());
        if let Some((name, _)) = named {
            bail!("--shards {spec}: give the shares of the sources too, as in --set data.mix.{name}=0.5");
        }
    }
    Ok(())
}

/// Reads the weight of each sample of `dataset`; 0 for one that is not in the list.
fn weights(path: &Path, dataset: &Dataset) -> anyhow::Result<Vec<f64>> {
    let list = Column::read(path, "weight")?;
    let mut weights = Vec::with_capacity(dataset.n_samples() as usize);
    let mut n_unlisted = 0u64;
    for id in (0..dataset.n_samples()).map(SampleId) {
        let (shard, number) = dataset.locate(id);
        let name = shard.name();
        let key = shard.key(number);
        let weight = match list.of(Some(&name), key)? {
            Some(text) => match text.parse::<f64>() {
                Ok(weight) => weight,
                Err(_) => bail!("{}: the weight of {key} is {text:?}, which is no number", path.display()),
            },
            None => {
                n_unlisted += 1;
                0.0
            }
        };
        weights.push(weight);
    }
    if n_unlisted > 0 && n_unlisted < dataset.n_samples() {
        say(format!(
            "note: {n_unlisted} of {} images are not in {}, and are not shown",
            dataset.n_samples(),
            path.display()
        ));
    }
    if n_unlisted == dataset.n_samples() {
        bail!("{} names none of the images of --shards", path.display());
    }
    Ok(weights)
}
