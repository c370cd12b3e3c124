//! The evaluated network of a run in progress.

use kernels::device::host::to_host;
use networks::Network;
use networks::tensor::joined;

use crate::error::TrainError;
use crate::recipe::plan::Plan;
use crate::step::Trainer;

/// Gathers the backbone of the evaluated network on rank 0. All ranks call it.
///
/// # Errors
/// [`TrainError::Ranks`]; [`TrainError::Network`] if a parameter is not finite.
pub(super) fn evaluated_network(trainer: &Trainer, plan: &Plan) -> Result<Option<Network>, TrainError> {
    let mut tensors = Vec::new();
    let name = trainer.state.method.evaluated();
    for shard in trainer.state.network(name).iter().flat_map(|network| network.backbone()) {
        let flat = trainer.gather_unit(&shard.layout.name, shard.weights.values())?;
        if trainer.topology().rank == 0 {
            tensors.extend(shard.layout.tensors(&to_host(flat)));
        }
    }
    // Steps gather in other sizes or types.
    trainer.comm.release_buffers();
    if trainer.topology().rank != 0 {
        return Ok(None);
    }
    let tensors = joined(tensors);
    let model = &plan.recipe.model;
    let pixels = plan.recipe.data.pixels();
    Ok(Some(Network::new(model, pixels, &tensors, plan.n_workers, trainer.device())?))
}
