//! The network that evaluation looks at while a run goes on.

use std::collections::HashMap;

use kernels::device::host::to_host;
use networks::Network;

use crate::error::TrainError;
use crate::recipe::plan::Plan;
use crate::step::Trainer;

/// The backbone that evaluation looks at, on rank 0. All ranks call it.
///
/// # Errors
/// [`TrainError::Ranks`].
pub(super) fn evaluated_network(trainer: &Trainer, plan: &Plan) -> Result<Option<Network>, TrainError> {
    let mut flats = HashMap::new();
    let name = trainer.state.method.evaluated();
    for shard in trainer.state.network(name).iter().flat_map(|network| network.backbone()) {
        let flat = trainer.gather_whole(&shard.layout.name, &shard.weights)?;
        if trainer.topology().rank == 0 {
            flats.insert(shard.layout.name.clone(), to_host(flat));
        }
    }
    if trainer.topology().rank != 0 {
        return Ok(None);
    }
    let (model, normalization) = (&plan.recipe.model, plan.recipe.data.normalization);
    let network = Network::new(model, normalization, plan.n_workers, trainer.device(), |layout| {
        flats.remove(&layout.name).ok_or_else(|| TrainError::NoUnit { unit: layout.name.clone() })
    });
    network.map(Some)
}
