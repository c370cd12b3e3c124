//! The evaluated network of a run in progress.

use networks::tensor::joined;
use networks::{NamedTensor, Network};

use crate::error::TrainError;
use crate::recipe::plan::Plan;
use crate::step::Trainer;

/// The evaluated network, gathered from all ranks.
pub(crate) struct Evaluated {
    /// Its backbone.
    pub(crate) network: Network,
    /// Parameters of its heads; empty unless they were gathered, too.
    pub(super) heads: Vec<NamedTensor>,
}

/// Gathers the backbone of the evaluated network on rank 0, adds its adapters to their weights, and
/// gathers its heads if `needs_heads`. All ranks call it.
///
/// # Errors
/// [`TrainError::Ranks`]; [`TrainError::Network`] if a parameter is not finite.
pub(crate) fn evaluated_network(
    trainer: &Trainer,
    plan: &Plan,
    needs_heads: bool,
) -> Result<Option<Evaluated>, TrainError> {
    let mut backbone = Vec::new();
    let mut heads = Vec::new();
    if let Some(network) = trainer.state.network(trainer.state.method.evaluated()) {
        for shard in network.backbone() {
            backbone.extend(trainer.gather_parameters(shard)?);
        }
        if needs_heads {
            for shard in &network.shards[network.n_backbone..] {
                heads.extend(trainer.gather_parameters(shard)?);
            }
        }
    }
    // Steps gather in other sizes or types.
    trainer.comm.release_buffers();
    if trainer.topology().rank != 0 {
        return Ok(None);
    }
    let mut backbone = joined(backbone);
    if let Some(adapter) = plan.recipe.optim.adapter {
        backbone = adapter.merge(backbone)?;
    }
    let model = &plan.recipe.model;
    let pixels = plan.recipe.data.pixels();
    let network = Network::new(model, pixels, &backbone, plan.n_workers, trainer.device())?;
    Ok(Some(Evaluated { network, heads: joined(heads) }))
}
