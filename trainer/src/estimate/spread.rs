//! How a model is spread over ranks.

use ranks::topology::Sharding;

use crate::recipe::plan::Plan;
use crate::step::precision::Precision;

/// How a model is spread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// Ranks, W.
    pub world_size: usize,
    /// Ranks of a shard group, S.
    pub group_size: usize,
    /// What is cut.
    pub sharding: Sharding,
    /// Units of the backbone that keep their graph, from the last on.
    pub keep: usize,
    /// Images of a step on one rank.
    pub rank_batch: usize,
    /// Micro-batches that these go in.
    pub rank_micro_batches: usize,
    /// Worker threads of a rank; 1 where a device works on the whole.
    pub workers: usize,
    /// How weights and gradients travel.
    pub precision: Precision,
    /// Whether weights, moments and followers lie in the host's memory, and units come to a GPU.
    pub offload: bool,
}

impl Spread {
    /// How `plan` spreads its model.
    pub fn of(plan: &Plan) -> Self {
        let step = plan.step_config();
        let rank_batch = plan.recipe.optim.batch_size / plan.world_size;
        Self {
            world_size: plan.world_size,
            group_size: plan.topology(0).map_or(plan.world_size, |topology| topology.group_size),
            sharding: step.sharding,
            keep: plan.keep,
            rank_batch,
            rank_micro_batches: (plan.n_micro_batches() / plan.world_size).max(1),
            workers: plan.n_workers.min(rank_batch),
            precision: step.precision,
            offload: step.offload,
        }
    }

    /// Whether weights are gathered at all.
    pub(super) fn gathers(&self) -> bool {
        self.group_size > 1 || self.offload
    }
}
