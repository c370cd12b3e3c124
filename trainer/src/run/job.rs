//! What a run is given, and whom it tells what.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use burn_tensor::Device;
use networks::tensor::NamedTensor;
use pipeline::Dataset;

use super::fault::Fault;
use crate::recipe::plan::Plan;

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
    /// Passes over the data set.
    pub epoch: f64,
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

/// A frozen network with its weights.
#[derive(Debug, Clone, PartialEq)]
pub struct FrozenNetwork {
    /// Its name, as its method has it.
    pub name: &'static str,
    /// Parameters of its backbone.
    pub weights: Vec<NamedTensor>,
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
    /// What the backbone starts from, where no checkpoint is there yet; random weights without it.
    pub initial: Option<&'a [NamedTensor]>,
    /// Weights of the frozen networks; random ones without them.
    pub frozen: &'a [FrozenNetwork],
    /// Whether the run may become longer than its plan says.
    pub lengthen: bool,
    /// The step of a checkpoint that another run has left as the beginning of this one, whose plan may be another.
    pub forked_step: Option<u64>,
}
