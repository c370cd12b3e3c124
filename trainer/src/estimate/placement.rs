//! Placement of a model on ranks.

use ranks::topology::Sharding;

use crate::recipe::plan::Plan;
use crate::step::precision::Precision;

/// Placement of a model on ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Placement {
    /// Number of ranks, W.
    pub world_size: usize,
    /// Number of ranks in a shard group, S.
    pub group_size: usize,
    /// Data that is sharded over ranks.
    pub sharding: Sharding,
    /// Number of backbone units, counted from the last, that keep their graph.
    pub keep: usize,
    /// Number of units without graph that are computed again together.
    pub segment: usize,
    /// Number of images of a step on one rank.
    pub rank_batch: usize,
    /// Number of micro-batches of a step on one rank.
    pub rank_micro_batches: usize,
    /// Worker threads of a rank; 1 where a device processes all images.
    pub workers: usize,
    /// Data types of computation, and of the weights and gradients that are sent.
    pub precision: Precision,
    /// True if gradients are summed in an order that does not depend on the ranks.
    pub exact_sums: bool,
    /// True if weights and moments of all networks are in host memory, and units are sent to a GPU.
    pub offload: bool,
    /// True if ranks compute on a GPU, where some losses hold more than on a CPU.
    pub is_gpu: bool,
}

impl Placement {
    /// Returns the distribution of `plan` over ranks that compute on a CPU.
    pub fn from_plan(plan: &Plan) -> Self {
        let step = plan.step_config();
        let rank_batch = plan.recipe.optim.batch_size / plan.world_size;
        Self {
            world_size: plan.world_size,
            group_size: plan.topology(0).map_or(plan.world_size, |topology| topology.group_size),
            sharding: step.sharding,
            keep: plan.keep,
            segment: plan.segment,
            rank_batch,
            rank_micro_batches: (plan.n_micro_batches() / plan.world_size).max(1),
            workers: plan.n_workers.min(rank_batch),
            precision: step.precision,
            exact_sums: plan.recipe.run.exact_sums,
            offload: step.offload,
            is_gpu: false,
        }
    }

    /// Returns the placement of one image on each of `n_ranks` ranks, which share all weights and
    /// keep no graph.
    #[cfg(test)]
    pub(super) fn one_image_each(n_ranks: usize) -> Self {
        Self {
            world_size: n_ranks,
            group_size: n_ranks,
            sharding: Sharding::Full,
            keep: 0,
            segment: 1,
            rank_batch: 1,
            rank_micro_batches: 1,
            workers: 1,
            precision: Precision::default(),
            exact_sums: true,
            offload: false,
            is_gpu: false,
        }
    }
}
