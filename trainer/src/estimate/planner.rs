//! Ways to distribute a model over ranks, each with its estimates.

use ranks::topology::Sharding;
use serde_json::{Value, json};

use super::{Hardware, Memory, Placement, StepTime, Traffic, memory, retention, traffic};
use crate::cost::{ModelCost, UnitCost};
use crate::recipe::Recipe;

/// Settings that all numbers of ranks share.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannerSettings {
    /// Images of a step over all ranks.
    pub batch_size: usize,
    /// Images of a step on each rank, instead of its part of `batch_size`.
    pub rank_batch: Option<usize>,
    /// Micro-batches of a step over all ranks.
    pub micro_batches: usize,
    /// Micro-batches of a step on each rank, instead of its part of `micro_batches`.
    pub rank_micro_batches: Option<usize>,
    /// Ranks of a shard group in the mode `group`.
    pub group_size: usize,
    /// Number of backbone units that keep their graph; as many as fit if absent.
    pub keep: Option<usize>,
    /// Number of units without graph that are computed again together; chosen if absent.
    pub segment: Option<usize>,
    /// Worker threads of a rank.
    pub workers: usize,
    /// Whether gradients are summed in an order that does not depend on the ranks.
    pub exact_sums: bool,
}

impl PlannerSettings {
    /// Returns the settings of `recipe`; without one, those of a step of `batch_size` images in one
    /// micro-batch on each rank. Shard groups are nodes of `ranks_per_node`, unless the recipe sets
    /// them.
    pub fn new(recipe: Option<&Recipe>, batch_size: usize, ranks_per_node: usize) -> Self {
        let set_group = recipe.map(|recipe| recipe.run.shard_group).filter(|group| *group > 0);
        Self {
            batch_size: recipe.map_or(batch_size, |recipe| recipe.optim.batch_size),
            rank_batch: None,
            micro_batches: recipe.map_or(1, |recipe| recipe.optim.micro_batches),
            rank_micro_batches: None,
            group_size: set_group.unwrap_or(ranks_per_node),
            keep: recipe.and_then(|recipe| recipe.run.keep),
            segment: recipe.and_then(|recipe| recipe.run.segment),
            workers: 1,
            exact_sums: recipe.is_none_or(|recipe| recipe.run.exact_sums),
        }
    }

    /// Returns the images of a step on each of `world_size` ranks.
    pub fn images_per_rank(&self, world_size: usize) -> usize {
        self.rank_batch.unwrap_or_else(|| self.batch_size.div_ceil(world_size))
    }
}

/// A model on hardware, to be distributed over any number of ranks.
#[derive(Debug, Clone, Copy)]
pub struct Planner<'a> {
    /// Costs of the model.
    pub model: &'a ModelCost,
    /// Hardware of the ranks.
    pub hardware: &'a Hardware,
    /// Settings of the run.
    pub settings: &'a PlannerSettings,
}

/// One way to distribute a model over some ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanRow {
    /// Name of the sharding mode.
    pub mode: &'static str,
    /// Placement of the model.
    pub placement: Placement,
    /// Memory of a rank.
    pub memory: Memory,
    /// Whether a rank has that memory.
    pub fits: bool,
}

/// A way to distribute a model, with all of its estimates.
#[derive(Debug, Clone, PartialEq)]
pub struct RowEstimate {
    /// The way.
    pub row: PlanRow,
    /// Traffic of a step.
    pub traffic: Traffic,
    /// Time of a step.
    pub time: StepTime,
    /// Number of steps of the run, if it is known.
    pub steps: Option<u64>,
}

impl Planner<'_> {
    /// Returns a row for each mode with `world_size` ranks and `rank_batch` images on each.
    pub fn rows(&self, world_size: usize, rank_batch: usize) -> Vec<PlanRow> {
        let Self { model, hardware, settings } = self;
        let rank_micro_batches =
            settings.rank_micro_batches.unwrap_or(settings.micro_batches / world_size).clamp(1, rank_batch);
        let group = settings.group_size;
        let mut modes = vec![("none", Sharding::None, 1)];
        if world_size > 1 {
            modes.push(("grad", Sharding::Grad, world_size));
            modes.push(("full", Sharding::Full, world_size));
            if group > 1 && group < world_size && world_size.is_multiple_of(group) {
                modes.push(("group", Sharding::Full, group));
            }
        }
        // Shard groups must be multiples of the groups that divide prototypes.
        let n_parts = model.n_parts();
        modes.retain(|(.., group_size)| n_parts == 1 || model.divides(n_parts, *group_size));
        let mut rows = Vec::new();
        for (mode, sharding, group_size) in modes {
            let placement = Placement {
                world_size,
                group_size,
                sharding,
                keep: 0,
                segment: 1,
                rank_batch,
                rank_micro_batches,
                workers: settings.workers.min(rank_batch),
                precision: hardware.precision,
                exact_sums: settings.exact_sums,
                offload: false,
            };
            let (keep, segment) =
                retention(model, &placement, hardware.memory_bytes, settings.keep, settings.segment);
            let placement = Placement { keep: keep.min(model.trained.backbone.len()), segment, ..placement };
            let memory = memory(model, &placement);
            let fits = memory.needed_bytes() <= hardware.memory_bytes;
            rows.push(PlanRow { mode, placement, memory, fits });
        }
        rows
    }

    /// Estimates traffic and time of `row`, and the whole run of `steps`.
    pub fn estimate(&self, row: PlanRow, steps: Option<u64>) -> RowEstimate {
        RowEstimate {
            traffic: traffic(self.model, &row.placement),
            time: self.hardware.step(self.model, &row.placement),
            row,
            steps,
        }
    }
}

impl RowEstimate {
    /// Returns the images per second of all ranks.
    pub fn images_per_s(&self) -> f64 {
        (self.row.placement.rank_batch * self.row.placement.world_size) as f64 / self.time.step_s
    }

    /// Returns the seconds of the whole run.
    pub fn run_s(&self) -> Option<f64> {
        self.steps.map(|steps| steps as f64 * self.time.step_s)
    }

    /// Returns all numbers as JSON.
    fn to_json(&self) -> Value {
        let Self { row, traffic, time, .. } = self;
        let placement = &row.placement;
        let memory = &row.memory;
        json!({
            "ranks": placement.world_size,
            "mode": row.mode,
            "group": placement.group_size,
            "rank_batch": placement.rank_batch,
            "keep": placement.keep,
            "segment": placement.segment,
            "fits": row.fits,
            "state_bytes": memory.state_bytes,
            "gradient_bytes": memory.gradient_bytes,
            "gathered_bytes": memory.gathered_bytes,
            "input_bytes": memory.input_bytes,
            "activation_bytes": memory.activation_bytes,
            "work_bytes": memory.work_bytes,
            "buffer_bytes": memory.buffer_bytes,
            "peak_bytes": memory.peak_bytes(),
            "checkpoint_bytes": memory.checkpoint_bytes,
            "gather_bytes": traffic.gather_bytes,
            "reduce_bytes": traffic.reduce_bytes,
            "replica_bytes": traffic.replica_bytes,
            "column_bytes": traffic.column_bytes,
            "other_bytes": traffic.other_bytes,
            "n_gathers": traffic.n_gathers,
            "n_reduces": traffic.n_reduces,
            "n_other": traffic.n_other,
            "compute_s": time.compute_s,
            "moving_s": time.moving_s,
            "waiting_s": time.waiting_s,
            "step_s": time.step_s,
            "images_per_s": self.images_per_s(),
            "steps": self.steps,
            "run_s": self.run_s(),
        })
    }
}

/// Returns the networks of `model` and the `rows` of its plan as JSON.
pub fn plan_to_json(model: &ModelCost, rows: &[RowEstimate]) -> Value {
    let mut others = Vec::new();
    for network in &model.others {
        others.push(json!({
            "name": network.name,
            "parameters": network.numel(),
            "is_frozen": network.is_frozen,
        }));
    }
    json!({
        "model": model.name,
        "parameters": model.trained.numel(),
        "head_parameters": UnitCost::total_numel(&model.trained.head),
        "others": others,
        "moments": model.n_moments,
        "rows": rows.iter().map(RowEstimate::to_json).collect::<Vec<_>>(),
    })
}
