//! The batches of one rank.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use augment::{Batch, BatchPool};
use pipeline::{Cursor, Share};

use super::Job;
use crate::data::{ShardSource, batches};
use crate::error::TrainError;
use crate::plan::Plan;
use crate::step::Trainer;

/// What the next step has to work with.
pub(super) enum Next {
    Batch(Batch),
    /// The run was asked to stop while it waited.
    Stopped,
    Failed(TrainError),
}

/// Waits for the next batch, or until the run is asked to stop.
pub(super) fn next_batch(pool: &mut BatchPool<ShardSource>, stop: &AtomicBool) -> Next {
    match pool.next_batch_unless(stop) {
        Some(Ok(batch)) => Next::Batch(batch),
        Some(Err(error)) => Next::Failed(error.into()),
        None if stop.load(Ordering::Relaxed) => Next::Stopped,
        None => Next::Failed(TrainError::DataEnded),
    }
}

/// Batches from where the state stands.
pub(super) fn open_pool(
    job: &Job<'_>,
    plan: &Plan,
    trainer: &Trainer,
) -> Result<BatchPool<ShardSource>, TrainError> {
    let place = trainer.place();
    let share = Share::new(place.part(), place.world_size, plan.recipe.optim.batch_size)?;
    // Each rank notes what it has met; ranks on other machines could not append to one file.
    let name = match place.rank {
        0 => "quarantine.jsonl".to_string(),
        rank => format!("quarantine-{rank:05}.jsonl"),
    };
    let cursor = Cursor(trainer.state.step + trainer.state.skipped_batches);
    Ok(batches(Arc::clone(&job.dataset), plan, share, cursor, &job.workdir.join(name))?)
}
