//! The batches of one rank.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use augment::{Batch, BatchPool};
use burn_tensor::Device;
use pipeline::{Cursor, Share};
use ranks::EngineError;

use super::data::{ShardSource, batches};
use super::job::Job;
use super::labels::Labels;
use super::mixing::Mixer;
use crate::error::TrainError;
use crate::recipe::plan::Plan;
use crate::schedule::ScheduledValues;
use crate::step::upload::{Upload, Uploads};
use crate::step::{Gradients, Trainer};

/// Input of the next step, or the reason for its absence.
pub(super) enum Next {
    Batch(BatchSource),
    /// The run was asked to stop while it waited.
    Stopped,
    Failed(TrainError),
}

/// A batch in host memory, or in an upload to the device.
pub(super) enum BatchSource {
    Here(Batch),
    Sent(Upload),
}

/// The batches of one rank.
pub(super) struct Stream {
    pool: BatchPool<ShardSource>,
    /// Labels of all samples, if the method learns from them.
    labels: Option<Arc<Labels>>,
    /// Mixes the images, if the method wants that.
    mixer: Option<Mixer>,
    /// Uploads to a device other than the CPU.
    uploads: Option<Uploads>,
}

impl Stream {
    /// Opens the batches that follow the state of `trainer`.
    pub(super) fn open(job: &Job<'_>, plan: &Plan, trainer: &Trainer) -> Result<Self, TrainError> {
        check_labels(job, plan)?;
        let uploads = (job.device != Device::flex()).then(|| Uploads::start(trainer.uploader()));
        let uploads = uploads.transpose()?;
        let mixer = Mixer::new(plan)?;
        Ok(Self { pool: open_pool(job, plan, trainer)?, labels: job.labels.clone(), mixer, uploads })
    }

    /// Waits for the next batch, or until the run is asked to stop.
    pub(super) fn next(&mut self, stop: &AtomicBool) -> Next {
        match self.pool.next_batch_unless(stop) {
            Some(Ok(mut batch)) => {
                if let Some(labels) = &self.labels {
                    batch.labels = labels.for_samples(&batch.sample_ids);
                }
                if let Some(mixer) = &self.mixer {
                    mixer.mix(&mut batch);
                }
                Next::Batch(match &self.uploads {
                    Some(uploads) => BatchSource::Sent(uploads.push(batch)),
                    None => BatchSource::Here(batch),
                })
            }
            Some(Err(error)) => Next::Failed(error.into()),
            None if stop.load(Ordering::Relaxed) => Next::Stopped,
            None => Next::Failed(TrainError::DataEnded),
        }
    }

    /// Runs forward and backward passes on a batch and recycles its memory. Also returns the
    /// milliseconds that were spent waiting for the upload.
    pub(super) fn gradients(
        &self,
        arrival: BatchSource,
        trainer: &Trainer,
        scheduled_values: &ScheduledValues,
        entering: &mut dyn FnMut(&'static str),
    ) -> Result<(Gradients, f64), EngineError> {
        match arrival {
            BatchSource::Here(batch) => {
                let gradients = trainer.gradients(&batch, scheduled_values, entering)?;
                self.pool.recycle(batch);
                Ok((gradients, 0.0))
            }
            BatchSource::Sent(upload) => {
                entering("upload");
                let waiting = Instant::now();
                let (batch, sent) = upload.wait()?;
                let waited_ms = waiting.elapsed().as_secs_f64() * 1e3;
                self.pool.recycle(batch);
                Ok((trainer.gradients_from_device_batch(sent, scheduled_values, entering)?, waited_ms))
            }
        }
    }
}

/// Checks that the images have labels, and that the classes are known, if the method of `plan`
/// learns from labels.
///
/// # Errors
/// [`TrainError::Recipe`].
fn check_labels(job: &Job<'_>, plan: &Plan) -> Result<(), TrainError> {
    let Some(classes) = plan.recipe.method.classes() else { return Ok(()) };
    let n_samples = job.dataset.n_samples();
    let n_labels = job.labels.as_ref().map(|labels| labels.len() as u64);
    if classes.is_empty() || n_labels != Some(n_samples) {
        let reason = "method.classes: the labels of the images have to be read before the run begins".into();
        return Err(TrainError::Recipe { recipe: plan.recipe.name.clone(), reason });
    }
    Ok(())
}

/// Starts the stream of batches that follow the state of `trainer`.
fn open_pool(job: &Job<'_>, plan: &Plan, trainer: &Trainer) -> Result<BatchPool<ShardSource>, TrainError> {
    let topology = trainer.topology();
    let share = Share::new(topology.data_rank(), topology.world_size, plan.recipe.optim.batch_size)?;
    // Each rank records its bad samples in its own file; ranks on other machines could not append
    // to one.
    let name = match topology.rank {
        0 => "quarantine.jsonl".to_string(),
        rank => format!("quarantine-{rank:05}.jsonl"),
    };
    let cursor = Cursor(trainer.state.step + trainer.state.skipped_batches);
    Ok(batches(Arc::clone(&job.dataset), plan, share, cursor, &job.workdir.join(name))?)
}
