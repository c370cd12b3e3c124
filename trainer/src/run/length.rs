//! Length in steps of a run that is given minutes.
//!
//! A few steps are taken on the first batches of the run, timed, and forgotten: the run begins
//! afterwards, from its initial weights. So the number of steps is known before the first one, whose
//! rates depend on it, and a run with the same plan has the same bits.

use std::sync::atomic::AtomicBool;
use std::time::Instant;

use ranks::communicator::Communicator;
use ranks::engine::Reduction;

use super::job::Job;
use super::stream::{BatchSource, Next, Stream};
use crate::error::TrainError;
use crate::step::Votes;

/// Fewest steps that are timed, after the first, which warms up.
const FEWEST_STEPS: usize = 3;

/// Most steps that are timed.
const MOST_STEPS: usize = 20;

/// Share of the minutes after which no further step is timed.
const SHARE: f64 = 0.05;

/// Length of a run that was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredLength {
    /// Number of steps that fit into the minutes that are left.
    pub steps: u64,
    /// Median time of a step, in seconds, on the slowest rank.
    pub step_s: f64,
    /// Number of steps that were timed.
    pub n_timed: usize,
}

/// Measures how many steps of the job's plan fit into `minutes`, the time of measuring included,
/// and returns the communicator. The batches are those of the job, with bad samples in the ledger
/// of its work directory; weights are random. All ranks call it, and get the same number.
///
/// # Errors
/// Any error that stops a run in its first steps.
pub fn measure_length(
    job: &Job<'_>,
    minutes: f64,
    comm: Communicator,
) -> Result<(MeasuredLength, Communicator), TrainError> {
    let start = Instant::now();
    std::fs::create_dir_all(job.workdir)
        .map_err(|error| TrainError::io("create folder", job.workdir, error))?;
    let schedules = job.plan.schedules();
    let mut trainer = job.plan.trainer(comm, &job.device)?;
    let mut stream = Stream::open(job, job.plan, &trainer)?;
    let never = AtomicBool::new(false);
    let mut next = stream.next(&never);
    let mut times_s: Vec<f64> = Vec::new();
    loop {
        let is_timed = times_s.len() > FEWEST_STEPS;
        let is_late = start.elapsed().as_secs_f64() > SHARE * 60.0 * minutes;
        let is_enough = times_s.len() > MOST_STEPS || (is_timed && is_late);
        let Some(batch) = agree_on_batch(&trainer.comm, next, is_enough)? else { break };
        let step_start = Instant::now();
        let scheduled_values = schedules.at(trainer.state.step);
        let (gradients, _) = stream.gradients(batch, &trainer, &scheduled_values, &mut |_| {})?;
        // As in the run, the next batch is fetched before the update.
        next = stream.next(&never);
        trainer.update(gradients, Votes::default(), &scheduled_values)?;
        times_s.push(step_start.elapsed().as_secs_f64());
    }
    times_s.remove(0);
    let n_timed = times_s.len();
    let elapsed_s = start.elapsed().as_secs_f64();
    let slowest =
        trainer.comm.all_reduce("time of a step", vec![median(times_s), elapsed_s], Reduction::Max)?;
    let step_s = slowest[0];
    let left_s = 60.0 * minutes - slowest[1];
    let steps = (left_s / step_s).floor().max(1.0) as u64;
    Ok((MeasuredLength { steps, step_s, n_timed }, trainer.comm))
}

/// Returns the batch in `next` if all ranks have theirs; `None` if rank 0 finds that enough steps
/// were timed. All ranks call it.
fn agree_on_batch(
    comm: &Communicator,
    next: Next,
    is_enough: bool,
) -> Result<Option<BatchSource>, TrainError> {
    let batch = match next {
        Next::Batch(batch) => Ok(batch),
        Next::Failed(error) => Err(error),
        Next::Stopped => Err(TrainError::DataEnded),
    };
    let is_first = comm.topology().rank == 0;
    let votes = vec![f64::from(u8::from(batch.is_err())), f64::from(u8::from(is_first && is_enough))];
    let sums = comm.all_reduce("measured step", votes, Reduction::Sum)?;
    let batch = batch?;
    if sums[0] > 0.0 {
        return Err(TrainError::PeersFailed { n_ranks: sums[0] as usize });
    }
    if sums[1] > 0.0 { Ok(None) } else { Ok(Some(batch)) }
}

/// Returns the median of `values`, the upper one of an even number.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}
