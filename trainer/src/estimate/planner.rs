//! Ways to distribute a model over ranks, each with its estimates.

use ranks::topology::Sharding;
use serde_json::{Value, json};

use super::{Hardware, Memory, Placement, StepTime, Traffic, memory, retention, traffic};
use crate::cost::{ModelCost, UnitCost};
use crate::recipe::Recipe;

/// Settings that do not depend on the number of ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannerSettings {
    /// Global batch size.
    pub batch_size: usize,
    /// Images of a step on each rank, instead of its part of `batch_size`.
    pub rank_batch: Option<usize>,
    /// Micro-batches per step, over all ranks.
    pub micro_batches: usize,
    /// Micro-batches of a step on each rank, instead of its part of `micro_batches`.
    pub rank_micro_batches: Option<usize>,
    /// Ranks of a shard group in the mode `group`.
    pub group_size: usize,
    /// Number of backbone units that keep their graph; as many as fit if absent.
    pub keep: Option<usize>,
    /// Number of units without graph that are recomputed together; chosen automatically if absent.
    pub segment: Option<usize>,
    /// Worker threads of a rank.
    pub workers: usize,
    /// Whether gradients are summed in an order that does not depend on the ranks.
    pub exact_sums: bool,
}

impl PlannerSettings {
    /// Returns the settings of `recipe`. Shard groups are nodes of `ranks_per_node`, unless the
    /// recipe sets them.
    pub fn from_recipe(recipe: &Recipe, ranks_per_node: usize) -> Self {
        let Recipe { optim, run, .. } = recipe;
        Self {
            micro_batches: optim.micro_batches,
            group_size: if run.shard_group > 0 { run.shard_group } else { ranks_per_node },
            keep: run.keep,
            segment: run.segment,
            exact_sums: run.exact_sums,
            ..Self::for_batch_size(optim.batch_size, ranks_per_node)
        }
    }

    /// Returns the settings of a step of `batch_size` images, in one micro-batch on each rank.
    /// Shard groups are nodes of `ranks_per_node`.
    pub fn for_batch_size(batch_size: usize, ranks_per_node: usize) -> Self {
        Self {
            batch_size,
            rank_batch: None,
            micro_batches: 1,
            rank_micro_batches: None,
            group_size: ranks_per_node,
            keep: None,
            segment: None,
            workers: 1,
            exact_sums: true,
        }
    }

    /// Returns the images of a step on each of `world_size` ranks.
    pub fn images_per_rank(&self, world_size: usize) -> usize {
        self.rank_batch.unwrap_or_else(|| self.batch_size.div_ceil(world_size))
    }

    /// Returns the micro-batches of a step on each of `world_size` ranks, with `rank_batch` images
    /// each.
    pub fn micro_batches_per_rank(&self, world_size: usize, rank_batch: usize) -> usize {
        self.rank_micro_batches.unwrap_or(self.micro_batches / world_size).clamp(1, rank_batch.max(1))
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
pub struct Candidate {
    /// Placement of the model.
    pub placement: Placement,
    /// Memory of a rank.
    pub memory: Memory,
    /// Whether a rank has that memory.
    pub fits: bool,
}

/// A way to distribute a model, with all of its estimates.
#[derive(Debug, Clone, PartialEq)]
pub struct CandidateEstimate {
    /// The way.
    pub candidate: Candidate,
    /// Traffic of a step.
    pub traffic: Traffic,
    /// Time of a step.
    pub time: StepTime,
    /// Number of steps of the run, if it is known.
    pub steps: Option<u64>,
}

impl Planner<'_> {
    /// Returns a candidate for each mode with `world_size` ranks and `rank_batch` images on each.
    pub fn candidates(&self, world_size: usize, rank_batch: usize) -> Vec<Candidate> {
        let Self { model, hardware, settings } = self;
        let rank_micro_batches = settings.micro_batches_per_rank(world_size, rank_batch);
        let group = settings.group_size;
        let mut modes = vec![(Sharding::None, 1)];
        if world_size > 1 {
            modes.push((Sharding::Grad, world_size));
            modes.push((Sharding::Full, world_size));
            if group > 1 && group < world_size && world_size.is_multiple_of(group) {
                modes.push((Sharding::Full, group));
            }
        }
        // Shard groups must be multiples of the groups that divide prototypes.
        let n_parts = model.n_parts();
        modes.retain(|(_, group_size)| n_parts == 1 || model.divides(n_parts, *group_size));
        let mut candidates = Vec::new();
        for (sharding, group_size) in modes {
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
                is_gpu: hardware.is_gpu,
            };
            let (keep, segment) =
                retention(model, &placement, hardware.memory_bytes, settings.keep, settings.segment);
            let placement = Placement { keep: keep.min(model.trained.backbone.len()), segment, ..placement };
            let needed = memory(model, &placement);
            let fits = needed.needed_bytes() <= hardware.memory_bytes;
            candidates.push(Candidate { placement, memory: needed, fits });
        }
        candidates
    }

    /// Estimates traffic and time of a step of `candidate`; `steps` gives the length of the run.
    pub fn estimate(&self, candidate: Candidate, steps: Option<u64>) -> CandidateEstimate {
        CandidateEstimate {
            traffic: traffic(self.model, &candidate.placement),
            time: self.hardware.step(self.model, &candidate.placement),
            candidate,
            steps,
        }
    }
}

impl Candidate {
    /// Returns the name of the mode: that of the sharding, or `group` within groups of ranks.
    pub fn mode(&self) -> &'static str {
        let Placement { sharding, group_size, world_size, .. } = self.placement;
        if sharding == Sharding::Full && group_size < world_size { "group" } else { sharding.name() }
    }
}

impl CandidateEstimate {
    /// Returns the images per second over all ranks.
    pub fn images_per_s(&self) -> f64 {
        let Placement { rank_batch, world_size, .. } = self.candidate.placement;
        (rank_batch * world_size) as f64 / self.time.step_s
    }

    /// Returns the seconds of the whole run.
    pub fn run_s(&self) -> Option<f64> {
        self.steps.map(|steps| steps as f64 * self.time.step_s)
    }

    /// Returns all numbers as JSON.
    fn to_json(&self) -> Value {
        let Self { candidate, traffic, time, .. } = self;
        let placement = &candidate.placement;
        let memory = &candidate.memory;
        json!({
            "ranks": placement.world_size,
            "mode": candidate.mode(),
            "group": placement.group_size,
            "rank_batch": placement.rank_batch,
            "keep": placement.keep,
            "segment": placement.segment,
            "fits": candidate.fits,
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

/// Converts a plan to JSON: the networks of `model`, and the `candidates`.
pub fn plan_to_json(model: &ModelCost, candidates: &[CandidateEstimate]) -> Value {
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
        "rows": candidates.iter().map(CandidateEstimate::to_json).collect::<Vec<_>>(),
    })
}
