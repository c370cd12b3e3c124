//! Frozen networks of a recipe: their files are read at every start.

use std::path::Path;

use anyhow::bail;
use trainer::Recipe;
use trainer::run::FrozenNetwork;
use trainer::run::status::Status;

use crate::backbone::{Backbone, WeightFlags};

/// Reads the weights of the frozen networks of `recipe`, and records in it what the files state:
/// backbone, colors and fingerprint. A run that has begun in `workdir` continues only with the same
/// weights, at any path.
pub(crate) fn open(recipe: &mut Recipe, workdir: Option<&Path>) -> anyhow::Result<Vec<FrozenNetwork>> {
    let mut before = workdir.and_then(|workdir| Status::of(workdir).ok()).map(|run| run.plan.recipe.method);
    let before = before.as_mut().map(|method| method.frozen()).unwrap_or_default();
    let mut networks = Vec::new();
    for entry in recipe.method.frozen() {
        let name = entry.name;
        let frozen = entry.weights;
        let has_heads = entry.has_heads;
        let key = format!("method.{name}.weights");
        if frozen.weights.is_empty() {
            bail!("{key} is empty: give --set {key}=RUN, the network that is distilled");
        }
        let begun = before.iter().find(|entry| entry.name == name).map(|entry| &*entry.weights);
        let path = Path::new(&frozen.weights);
        let opened = if has_heads {
            Backbone::open_with_heads(path)
        } else {
            Backbone::open(path, &WeightFlags::default(), None)
        };
        let backbone = match opened {
            Ok(backbone) => backbone,
            // A chain of causes would yield the exit code of a data error.
            Err(error) if begun.is_some() => bail!(
                "{key}: {error:#}; a frozen network is read at every start: put the file back, or say where it is now with \
                 --set {key}=PATH"
            ),
            Err(error) => bail!("{key}: {error:#}"),
        };
        let theirs = backbone.preprocessing.pixels.depth;
        let ours = recipe.data.depth;
        if theirs != ours {
            bail!(
                "{key}: {} takes images of {} bits, and data.bits is {}: both see the same views",
                path.display(),
                theirs.bits(),
                ours.bits()
            );
        }
        let fingerprint = format!("{:016x}", weights::fingerprint(&backbone.tensors));
        let expected = begun.map_or(&frozen.fingerprint, |begun| &begun.fingerprint);
        if !expected.is_empty() && *expected != fingerprint {
            bail!(
                "{key}: {} has different weights from those that the run started with: put the file back, or choose another --workdir",
                path.display()
            );
        }
        if let Some(begun) = begun {
            frozen.weights.clone_from(&begun.weights);
        }
        frozen.fingerprint = fingerprint;
        frozen.normalization = Some(backbone.preprocessing.pixels.normalization.clone());
        frozen.heads = backbone.head_shapes();
        frozen.saw_masks = has_heads && backbone.saw_masks();
        frozen.model = Some(backbone.model);
        networks.push(FrozenNetwork { name, weights: backbone.tensors });
    }
    Ok(networks)
}
