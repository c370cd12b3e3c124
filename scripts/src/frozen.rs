//! Frozen networks that a recipe names: their files are read at every start.

use std::path::Path;

use anyhow::bail;
use trainer::Recipe;
use trainer::run::FrozenNetwork;
use trainer::run::status::Status;

use crate::backbone::{Backbone, WeightFlags};

/// Reads the weights of the frozen networks of `recipe`, and writes what the files say into it: backbone, colors and
/// fingerprint. A run that has begun in `workdir` goes on with the same weights alone, wherever they lie now.
pub(crate) fn open(recipe: &mut Recipe, workdir: Option<&Path>) -> anyhow::Result<Vec<FrozenNetwork>> {
    let mut before = workdir.and_then(|workdir| Status::of(workdir).ok()).map(|run| run.plan.recipe.method);
    let mut before = before.as_mut().map(|method| method.frozen()).unwrap_or_default();
    let mut networks = Vec::new();
    for (name, frozen) in recipe.method.frozen() {
        let key = format!("method.{name}.weights");
        let begun = before.iter_mut().find(|(of, _)| *of == name).map(|(_, frozen)| &**frozen);
        let path = Path::new(&frozen.weights);
        let backbone = match Backbone::open(path, &WeightFlags::default(), None) {
            Ok(backbone) => backbone,
            // A chain of causes would end the program as a fault of the data.
            Err(error) if begun.is_some() => bail!(
                "{key}: {error:#}; a frozen network is read at every start: put the file back, or say where it is now with \
                 --set {key}=PATH"
            ),
            Err(error) => bail!("{key}: {error:#}"),
        };
        let fingerprint = format!("{:016x}", weights::fingerprint(&backbone.tensors));
        let expected = begun.map_or(&frozen.fingerprint, |begun| &begun.fingerprint);
        if !expected.is_empty() && *expected != fingerprint {
            bail!(
                "{key}: {} holds other weights than those that the run began with: put them back, or choose another --workdir",
                path.display()
            );
        }
        if let Some(begun) = begun {
            frozen.weights.clone_from(&begun.weights);
        }
        frozen.fingerprint = fingerprint;
        frozen.normalization = Some(backbone.preprocessing.normalization);
        frozen.model = Some(backbone.model);
        networks.push(FrozenNetwork { name, weights: backbone.tensors });
    }
    Ok(networks)
}
