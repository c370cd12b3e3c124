//! The evaluated network of a run in progress.

use kernels::device::host::to_host;
use networks::tensor::joined;
use networks::{NamedTensor, Network};

use crate::error::TrainError;
use crate::recipe::plan::Plan;
use crate::step::Trainer;

/// The evaluated network, gathered from all ranks.
pub(super) struct Evaluated {
    /// Its backbone.
    pub(super) network: Network,
    /// Parameters of its heads; empty unless they were gathered, too.
    pub(super) heads: Vec<NamedTensor>,
}

/// Gathers the backbone of the evaluated network on rank 0, and its heads if `needs_heads`. All
/// ranks call it.
///
/// # Errors
/// [`TrainError::Ranks`]; [`TrainError::Network`] if a parameter is not finite.
pub(super) fn evaluated_network(
    trainer: &Trainer,
    plan: &Plan,
    needs_heads: bool,
) -> Result<Option<Evaluated>, TrainError> {
    let mut backbone = Vec::new();
    let mut heads = Vec::new();
    if let Some(network) = trainer.state.network(trainer.state.method.evaluated()) {
        let n_gathered = if needs_heads { network.shards.len() } else { network.n_backbone };
        for (index, shard) in network.shards[..n_gathered].iter().enumerate() {
            let flat = trainer.gather_unit(&shard.layout.name, shard.weights.values())?;
            if trainer.topology().rank != 0 {
                continue;
            }
            let tensors = shard.layout.tensors(&to_host(flat));
            if index < network.n_backbone {
                backbone.extend(tensors);
            } else {
                heads.extend(tensors);
            }
        }
    }
    // Steps gather in other sizes or types.
    trainer.comm.release_buffers();
    if trainer.topology().rank != 0 {
        return Ok(None);
    }
    let model = &plan.recipe.model;
    let pixels = plan.recipe.data.pixels();
    let network = Network::new(model, pixels, &joined(backbone), plan.n_workers, trainer.device())?;
    Ok(Some(Evaluated { network, heads: joined(heads) }))
}
