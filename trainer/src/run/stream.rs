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
use crate::method::MethodConfig;
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

/// Checks that the images of `job` have the labels of `plan`, if its method learns from labels, and
/// that their masks have been read, if it learns from masks.
///
/// # Errors
/// [`TrainError::Recipe`].
fn check_labels(job: &Job<'_>, plan: &Plan) -> Result<(), TrainError> {
    check_labels_of(&plan.recipe.method, job.labels.as_deref(), job.dataset.n_samples())
        .map_err(|reason| TrainError::Recipe { recipe: plan.recipe.name.clone(), reason })
}

/// Checks that `labels` are those of `n_samples` images that `method` has recorded, if it learns
/// from labels, and that it has recorded the classes of pixels, if it learns from masks.
///
/// # Errors
/// A message with the key and the reason.
fn check_labels_of(method: &MethodConfig, labels: Option<&Labels>, n_samples: u64) -> Result<(), String> {
    if method.pixel_classes().is_some_and(<[String]>::is_empty) {
        return Err("method.classes: the masks of the images have to be read before the run begins".into());
    }
    let mut method = method.clone();
    let Some(facts) = method.labels() else { return Ok(()) };
    let labels = labels.filter(|labels| labels.len() as u64 == n_samples && !facts.classes.is_empty());
    let Some(labels) = labels else {
        return Err("method.classes: the labels of the images have to be read before the run begins".into());
    };
    if *facts.fingerprint != format!("{:016x}", labels.fingerprint()) {
        return Err("method.labels: the labels of the images are not those that the plan was made for".into());
    }
    let n_classes = facts.classes.len();
    match labels.largest_class() {
        Some(class) if class as usize >= n_classes => Err(format!(
            "method.classes: an image is of the class number {class}, counted from 0, of {n_classes} classes"
        )),
        _ => Ok(()),
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::plans;

    /// Returns labels of one class for each image.
    fn labels(classes: &[u32]) -> Labels {
        Labels::new(classes.iter().map(|class| Some(vec![*class])))
    }

    /// Returns a method that learns from labels, with the fingerprint of `labels`, and the number
    /// of its classes.
    fn method_with(labels: &Labels) -> (MethodConfig, u32) {
        let mut methods = plans(&[]).into_iter().map(|plan| plan.recipe.method);
        let mut method = methods.find(|method| method.classes().is_some()).unwrap();
        let facts = method.labels().unwrap();
        *facts.fingerprint = format!("{:016x}", labels.fingerprint());
        let n_classes = facts.classes.len() as u32;
        (method, n_classes)
    }

    #[test]
    fn other_labels_than_those_of_the_plan_are_refused() {
        let ours = labels(&[1, 0, 1]);
        let (method, n_classes) = method_with(&ours);
        assert_eq!(check_labels_of(&method, Some(&ours), 3), Ok(()));
        let unread = "have to be read";
        let others = "not those that the plan was made for";
        for (labels, n_samples, words) in
            [(None, 3, unread), (Some(&ours), 4, unread), (Some(&labels(&[1, 1, 1])), 3, others)]
        {
            let reason = check_labels_of(&method, labels, n_samples).unwrap_err();
            assert!(reason.contains(words), "{reason}");
        }
        let outside = labels(&[0, n_classes, 1]);
        let (method, _) = method_with(&outside);
        let reason = check_labels_of(&method, Some(&outside), 3).unwrap_err();
        assert!(reason.contains(&format!("number {n_classes}, counted from 0")), "{reason}");
        let mut unknown = method.clone();
        unknown.labels().unwrap().classes.clear();
        let reason = check_labels_of(&unknown, Some(&outside), 3).unwrap_err();
        assert!(reason.contains(unread), "{reason}");
    }

    #[test]
    fn masks_have_to_be_read_before_a_run() {
        let mut methods = plans(&[]).into_iter().map(|plan| plan.recipe.method);
        let mut method = methods.find(|method| method.pixel_classes().is_some()).unwrap();
        assert_eq!(check_labels_of(&method, None, 3), Ok(()));
        method.pixel_labels().unwrap().classes.clear();
        let reason = check_labels_of(&method, None, 3).unwrap_err();
        assert!(reason.contains("the masks of the images have to be read"), "{reason}");
    }

    #[test]
    fn methods_without_labels_need_none() {
        let plan = plans(&[]).remove(0);
        assert!(plan.recipe.method.classes().is_none());
        assert_eq!(check_labels_of(&plan.recipe.method, None, 3), Ok(()));
    }
}
