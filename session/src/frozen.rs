//! Frozen networks of a recipe: their files are read at every start.

use std::path::Path;

use trainer::Recipe;
use trainer::run::FrozenNetwork;
use weights::Hints;

use crate::error::SessionError;
use crate::initial::{begun_plan, warn_of_decoding};
use crate::network::Backbone;

/// Reads the weights of the frozen networks of `recipe`, and records in it the facts that they
/// state: backbone, colors and fingerprint. A run that has begun in `workdir` is resumed only with
/// the same weights, at any path.
///
/// # Errors
/// [`SessionError`] with the key of the weights that cannot be used, or for a run whose plan cannot
/// be read.
pub fn open(recipe: &mut Recipe, workdir: Option<&Path>) -> Result<Vec<FrozenNetwork>, SessionError> {
    let mut earlier_method = None;
    if let Some(workdir) = workdir {
        earlier_method = begun_plan(workdir)?.map(|plan| plan.recipe.method);
    }
    let earlier = earlier_method.as_mut().map(|method| method.frozen()).unwrap_or_default();
    let mut networks = Vec::new();
    for entry in recipe.method.frozen() {
        let name = entry.name;
        let frozen = entry.weights;
        let key = format!("method.{name}.weights");
        if frozen.weights.is_empty() {
            return Err(SessionError::FrozenUnnamed { key });
        }
        let recorded = earlier.iter().find(|entry| entry.name == name).map(|entry| &*entry.weights);
        let path = Path::new(&frozen.weights);
        let opened = if entry.has_heads {
            Backbone::open_with_heads(path, None)
        } else {
            Backbone::open(path, &Hints::default())
        };
        let backbone = match opened {
            Ok(backbone) => backbone,
            // As text: a cause would yield the exit code of a data error.
            Err(error) if recorded.is_some() => {
                let reason = format!(
                    "{error}; a frozen network is read at every start: restore the file, or give its new \
                     path with --set {key}=PATH"
                );
                return Err(SessionError::Frozen { key, reason });
            }
            Err(error) => return Err(SessionError::Frozen { key, reason: error.to_string() }),
        };
        let theirs = backbone.preprocessing.pixels.depth;
        let ours = recipe.data.depth;
        if theirs != ours {
            return Err(SessionError::FrozenDepth {
                key,
                path: path.to_path_buf(),
                theirs: theirs.bits(),
                ours: ours.bits(),
            });
        }
        warn_of_decoding(path, backbone.preprocessing.decoding, &recipe.data);
        let fingerprint = format!("{:016x}", weights::fingerprint(&backbone.tensors));
        let expected = recorded.map_or(&frozen.fingerprint, |recorded| &recorded.fingerprint);
        if !expected.is_empty() && *expected != fingerprint {
            return Err(SessionError::FrozenChanged { key, path: path.to_path_buf() });
        }
        if let Some(recorded) = recorded {
            frozen.weights.clone_from(&recorded.weights);
        }
        frozen.fingerprint = fingerprint;
        frozen.normalization = Some(backbone.preprocessing.pixels.normalization.clone());
        frozen.heads = backbone.head_shapes();
        frozen.saw_masks = entry.has_heads && backbone.saw_masks();
        frozen.model = Some(backbone.model);
        networks.push(FrozenNetwork { name, weights: backbone.tensors });
    }
    Ok(networks)
}
