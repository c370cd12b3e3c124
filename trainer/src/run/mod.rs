//! A run: the loop from batches to steps, metrics, checkpoints and probes.

mod clock;
pub mod data;
mod duration;
pub(crate) mod evaluated;
mod event_message;
pub mod events;
pub mod fault;
pub(crate) mod health;
pub(crate) mod heartbeat;
mod job;
mod journal;
mod labels;
mod length;
mod metrics;
pub mod mixing;
mod pace;
mod rank;
mod source_counts;
pub mod status;
mod straggler;
mod stream;
pub mod telemetry;
mod validations;
mod workdir;

pub use duration::{format_duration, format_time};
pub use health::{Alert, Concern};
pub use heartbeat::host_name;
pub use job::{FrozenNetwork, Job, Observer, Outcome, Progress, Quiet};
pub use journal::probes_left_s;
pub use labels::Labels;
pub use length::{RunTimes, measure_times};
pub use pace::Pace;
pub use validations::{Validation, Validations, open_result};
pub use workdir::recorded_plan;

use std::io;
use std::path::Path;

use networks::probe::Probe;
use ranks::communicator::Communicator;
use ranks::flight_recorder::FlightRecorder;

use crate::error::TrainError;
use crate::recipe::plan::Plan;

/// Trains the job's plan until it is finished or asked to stop, resuming from the newest checkpoint
/// if there is one. All ranks call it with the same probes, which run on rank 0.
///
/// # Errors
/// [`TrainError::Recipe`] if the plan has patience with validations, and no probe is one; any error
/// that stops a run; written checkpoints stay.
pub fn run(
    job: &Job<'_>,
    comm: Communicator,
    probes: &mut [Box<dyn Probe>],
    observer: &mut dyn Observer,
) -> Result<Outcome, TrainError> {
    check_patience(job.plan, probes)?;
    let rank = comm.topology().rank;
    let recorder = comm.recorder();
    let result = rank::Run::open(job, comm, observer).and_then(|run| run.train(probes, observer));
    if let Err(TrainError::Ranks(_)) = &result {
        let folder = job.workdir.join("flight");
        match write_collectives(&folder, rank, &recorder) {
            Ok(()) => observer.warned(&format!("the last collectives are in {}", folder.display())),
            Err(error) => observer.warned(&format!("cannot write the last collectives: {error}")),
        }
    }
    result
}

/// Checks that a run that may end early is validated by one of `probes`.
fn check_patience(plan: &Plan, probes: &[Box<dyn Probe>]) -> Result<(), TrainError> {
    if plan.recipe.run.patience.is_none() || probes.iter().any(|probe| probe.watched().is_some()) {
        return Ok(());
    }
    Err(TrainError::Recipe {
        recipe: plan.recipe.name.clone(),
        reason: "run.patience ends a run by its validations, and this one has none: remove it (`ocelli \
                 finetune` validates a run)"
            .into(),
    })
}

/// Writes the last collectives of `rank` into a file in `folder`.
fn write_collectives(folder: &Path, rank: usize, recorder: &FlightRecorder) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    std::fs::write(folder.join(format!("rank-{rank:05}.jsonl")), recorder.dump())
}
