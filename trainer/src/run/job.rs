//! Inputs of a run, and the observer that it reports to.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use burn_tensor::Device;
use networks::tensor::NamedTensor;
use pipeline::Dataset;

use super::fault::Fault;
use super::health::Alert;
use super::labels::Labels;
use crate::recipe::plan::Plan;

/// Outcome of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are taken.
    Finished,
    /// The run was asked to stop, and a checkpoint is written.
    Stopped,
}

/// Progress of a run after a step, for a progress bar.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Steps taken.
    pub step: u64,
    /// Steps of the run.
    pub total_steps: u64,
    /// Loss of the last step.
    pub loss: f64,
    /// Images of a step, over all ranks.
    pub batch_size: usize,
    /// Seconds of the last step, without probes, pictures and checkpoints.
    pub step_s: f64,
    /// Milliseconds that the last step waited for a batch.
    pub data_wait_ms: f64,
    /// Passes over the data set.
    pub epoch: f64,
    /// Estimated seconds of the probes that are left, from those after this step on; 0 for probes
    /// that have not run yet.
    pub probes_left_s: f64,
}

/// Receiver of a run's reports.
pub trait Observer {
    /// Called once, with the step at which the run starts or resumes.
    fn started(&mut self, step: u64, total_steps: u64);
    /// Called after every step.
    fn stepped(&mut self, progress: Progress);
    /// Called with a warning, which is shown.
    fn warned(&mut self, message: &str);
    /// Called with an alert after a row of metrics. Of those with the same subject, one is shown.
    fn alerted(&mut self, alert: &Alert);
    /// Called before the probes of a step, on rank 0.
    fn probing(&mut self, step: u64);
    /// Called after a probe.
    fn probed(&mut self, step: u64, name: &str, numbers: &[(String, f64)]);
    /// Called after the probes of a step.
    fn probes_ended(&mut self);
}

/// An observer that shows nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Quiet;

impl Observer for Quiet {
    fn started(&mut self, _step: u64, _total_steps: u64) {}

    fn stepped(&mut self, _progress: Progress) {}

    fn warned(&mut self, _message: &str) {}

    fn alerted(&mut self, _alert: &Alert) {}

    fn probing(&mut self, _step: u64) {}

    fn probed(&mut self, _step: u64, _name: &str, _numbers: &[(String, f64)]) {}

    fn probes_ended(&mut self) {}
}

/// A frozen network with its weights.
#[derive(Debug, Clone, PartialEq)]
pub struct FrozenNetwork {
    /// Name of the network, as its method lists it.
    pub name: &'static str,
    /// Parameters of the backbone.
    pub weights: Vec<NamedTensor>,
}

/// Inputs of a run on one rank.
pub struct Job<'a> {
    /// Plan to run; the same on all ranks.
    pub plan: &'a Plan,
    /// Samples; the same on all ranks.
    pub dataset: Arc<Dataset>,
    /// Labels of all samples, if the method learns from them; the same on all ranks.
    pub labels: Option<Arc<Labels>>,
    /// Folder that receives all output; on several machines a folder that all of them see.
    pub workdir: &'a Path,
    /// Flag that requests the run to stop; may be set on any rank.
    pub stop: &'a AtomicBool,
    /// Device that this rank computes on.
    pub device: Device,
    /// Fault to inject.
    pub fault: Option<Fault>,
    /// Initial weights of the backbone, used if there is no checkpoint yet; random without them.
    pub initial: Option<&'a [NamedTensor]>,
    /// Weights of the frozen networks; random without them.
    pub frozen: &'a [FrozenNetwork],
    /// Whether the run may become longer than its plan says.
    pub lengthen: bool,
    /// Step of the checkpoint of another run from which this run is forked; the plans may differ.
    pub forked_step: Option<u64>,
}
