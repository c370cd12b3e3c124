//! The evaluated network of a run in progress.

use std::collections::HashMap;

use kernels::device::host::to_host;
use networks::Network;

use crate::error::TrainError;
use crate::recipe::plan::Plan;
use crate::step::Trainer;

/// Gathers the backbone of the evaluated network on rank 0. All ranks call it.
///
/// # Errors
/// [`TrainError::Ranks`].
pub(super) fn evaluated_network(trainer: &Trainer, plan: &Plan) -> Result<Option<Network>, TrainError> {
    // By parameter: a network under training may have some that evaluation has no use for.
    let mut values = HashMap::new();
    let name = trainer.state.method.evaluated();
    for shard in trainer.state.network(name).iter().flat_map(|network| network.backbone()) {
        let flat = trainer.gather_whole(&shard.layout.name, &shard.weights)?;
        if trainer.topology().rank == 0 {
            let flat = to_host(flat);
            let params = shard.layout.params.iter();
            values.extend(params.map(|slot| (shard.layout.full_name(slot), flat[slot.range()].to_vec())));
        }
    }
    if trainer.topology().rank != 0 {
        return Ok(None);
    }
    let (model, normalization) = (&plan.recipe.model, plan.recipe.data.normalization);
    let network = Network::new(model, normalization, plan.n_workers, trainer.device(), |layout| {
        let mut flat = vec![0.0; layout.padded];
        for slot in &layout.params {
            let found = values.remove(&layout.full_name(slot));
            let found = found.ok_or_else(|| TrainError::NoUnit { unit: layout.name.clone() })?;
            flat[slot.range()].copy_from_slice(&found);
        }
        Ok(flat)
    });
    network.map(Some)
}
