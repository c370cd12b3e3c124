//! Measurements of `ocelli bench shard`: training steps on several ranks, in one mode of sharding
//! after another.

use std::time::Instant;

use burn_tensor::Device;
use ranks::communicator::Communicator;
use ranks::engine::Reduction;
use ranks::mesh::Traffic;

use super::median;
use super::memory_gauge::MemoryGauge;
use super::noise::{noise_batch, rank_share};
use crate::cost::model_cost;
use crate::error::TrainError;
use crate::estimate::Memory;
use crate::estimate::{self, Placement};
use crate::recipe::plan::Plan;

/// Results of one mode of sharding. Bytes of memory and times are the largest over ranks.
#[derive(Debug, Clone)]
pub struct ShardBench {
    /// Bytes of weights and moments of all networks after a step, beyond those in use before the
    /// model was made.
    pub state_bytes: f64,
    /// Most bytes in use during a step, beyond those in use before the model was made.
    pub peak_bytes: f64,
    /// Estimate of the plan for memory.
    pub planned: Memory,
    /// Traffic of this rank per step.
    pub traffic: Traffic,
    /// Estimate of the plan for traffic.
    pub planned_traffic: estimate::Traffic,
    /// Median time of a step, on the slowest rank.
    pub step_ms: f64,
    /// Median time that a rank waited for others, on the rank that waited longest.
    pub wait_ms: f64,
    /// Loss of the last step.
    pub loss: f64,
}

/// Takes `repeats` steps on noise, after one for warm-up, and returns the communicator as well.
///
/// # Errors
/// [`TrainError`].
pub fn run(
    plan: &Plan,
    mut comm: Communicator,
    repeats: usize,
    memory: &dyn MemoryGauge,
    device: &Device,
) -> Result<(ShardBench, Communicator), TrainError> {
    let topology = plan
        .topology(comm.topology().rank)
        .map_err(|reason| TrainError::Recipe { recipe: plan.recipe.name.clone(), reason })?;
    comm.regroup(topology, plan.recipe.run.exact_sums)?;
    let batch = {
        let batch_size = plan.recipe.optim.batch_size;
        rank_share(noise_batch(&plan.multicrop(), plan.recipe.data.format(), batch_size, 0), topology)
    };
    let before = memory.bytes();
    let mut trainer = plan.trainer(comm, device)?;
    let scheduled_values = plan.schedules().at(plan.warmup_steps);
    let mut report = trainer.step(&batch, &scheduled_values)?;
    memory.reset_peak();
    let at_start = trainer.comm.traffic()?;
    let mut steps_ms = Vec::new();
    let mut waits_ms = Vec::new();
    for _ in 0..repeats.max(1) {
        let start = Instant::now();
        report = trainer.step(&batch, &scheduled_values)?;
        steps_ms.push(start.elapsed().as_secs_f64() * 1e3);
        waits_ms.push(report.phases.wait_ms);
    }
    let traffic = trainer.comm.traffic()?.since(at_start).over(repeats.max(1) as u64);
    let loss = report.loss;
    let peak = memory.peak_bytes().saturating_sub(before) as f64;
    drop(report);
    trainer.comm.release_buffers();
    let state = memory.bytes().saturating_sub(before) as f64;
    let rank_figures = vec![state, peak, median(steps_ms), median(waits_ms)];
    let worst = trainer.comm.all_reduce("figures", rank_figures, Reduction::Max)?;
    let model = model_cost(plan)?;
    let placement = Placement { is_gpu: *device != Device::flex(), ..Placement::from_plan(plan) };
    let bench = ShardBench {
        state_bytes: worst[0],
        peak_bytes: worst[1],
        planned: estimate::memory(&model, &placement),
        traffic,
        planned_traffic: estimate::traffic(&model, &placement),
        step_ms: worst[2],
        wait_ms: worst[3],
        loss,
    };
    Ok((bench, trainer.comm))
}
