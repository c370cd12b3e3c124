//! A run: batches in, steps, metrics, checkpoints, probes out.

mod rank;
mod stream;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use burn::tensor::Device;
use pipeline::Dataset;

use crate::backbone::Readout;
use crate::error::TrainError;
use crate::fault::Fault;
use crate::network::Network;
use crate::plan::Plan;
use crate::probe::Probe;
use crate::shard::comm::Comm;
use crate::shard::store::to_host;
use crate::shard::wire::Wire;
use crate::step::Trainer;

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are taken.
    Finished,
    /// It was asked to stop, and a checkpoint is written.
    Stopped,
}

/// What a step looked like, for a progress bar.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Steps taken.
    pub step: u64,
    /// Steps of the run.
    pub total_steps: u64,
    /// Loss of the last step.
    pub loss: f64,
    /// Images a second, over the last step and all ranks.
    pub images_per_s: f64,
    /// Time that the last step waited for a batch.
    pub data_wait_ms: f64,
}

/// What a run tells while it runs.
pub trait Observer {
    /// Called once, with the step that the run starts or continues at.
    fn started(&mut self, step: u64, total_steps: u64);
    /// Called after every step.
    fn stepped(&mut self, progress: Progress);
    /// Called with something that people should know once.
    fn warned(&mut self, message: &str);
    /// Called with something that has happened, each time.
    fn happened(&mut self, message: &str);
    /// Called after a probe.
    fn probed(&mut self, step: u64, name: &str, numbers: &[(String, f64)]);
}

/// What a rank is given to run.
pub struct Job<'a> {
    /// What to do; the same on all ranks.
    pub plan: &'a Plan,
    /// The samples; the same on all ranks.
    pub dataset: Arc<Dataset>,
    /// Where everything goes; on several machines a folder that all of them see.
    pub workdir: &'a Path,
    /// Set by whoever wants the run to stop, on any rank.
    pub stop: &'a AtomicBool,
    /// What this rank computes on.
    pub device: Device,
    /// A drill.
    pub fault: Option<Fault>,
}

/// Trains the job's plan until it is finished or asked to stop, from the newest checkpoint on if there is
/// one. All ranks call it, with the same probes, which run on rank 0.
///
/// # Errors
/// Whatever stops a run; what was checkpointed stays.
pub fn run(
    job: &Job<'_>,
    comm: Comm,
    probes: &mut [Box<dyn Probe>],
    observer: &mut dyn Observer,
) -> Result<Outcome, TrainError> {
    let (rank, recorder) = (comm.place().rank, comm.recorder());
    let result = rank::Run::open(job, comm, observer).and_then(|run| run.train(probes, observer));
    if let Err(TrainError::Ranks(_)) = &result {
        let folder = job.workdir.join("flight");
        let dump = || -> std::io::Result<()> {
            std::fs::create_dir_all(&folder)?;
            std::fs::write(folder.join(format!("rank-{rank:05}.jsonl")), recorder.dump())
        };
        match dump() {
            Ok(()) => observer.warned(&format!("the last collectives are in {}", folder.display())),
            Err(error) => observer.warned(&format!("the last collectives cannot be written: {error}")),
        }
    }
    result
}

/// The network under training that `plan` describes, at step zero, on `device`.
pub fn trainer_of(plan: &Plan, comm: Comm, device: &Device) -> Trainer {
    let model = &plan.recipe.model;
    let method = plan.recipe.method.build(plan.multicrop(), model.width());
    Trainer::new(
        model.units(Readout::Class),
        method,
        comm,
        plan.optimizer(),
        plan.step_config(),
        device.clone(),
    )
}

/// The teacher's backbone, as evaluation sees it, on rank 0. All ranks call it.
///
/// # Errors
/// [`TrainError::Ranks`].
pub fn teacher_of(trainer: &Trainer, plan: &Plan) -> Result<Option<Network>, TrainError> {
    let mut flats = std::collections::HashMap::new();
    for shard in &trainer.state.shards[..trainer.backbone.len()] {
        let mine = shard.teacher.clone().to_device(&trainer.device);
        let pending = trainer.comm.gather(&shard.layout.name, &mine, Wire::F32, false)?;
        let flat = trainer.comm.wait(pending)?;
        if trainer.place().rank == 0 {
            flats.insert(shard.layout.name.clone(), to_host(flat));
        }
    }
    if trainer.place().rank != 0 {
        return Ok(None);
    }
    let network = Network::new(&plan.recipe.model, plan.n_workers, &trainer.device, |layout| {
        flats.remove(&layout.name).ok_or_else(|| TrainError::NoUnit { unit: layout.name.clone() })
    });
    network.map(Some)
}
