//! Length in steps of a run that is given minutes.
//!
//! A few steps are taken on the first batches of the run, with a row of metrics and a checkpoint.
//! They are timed and forgotten: the run begins afterwards, from its initial weights. So the number
//! of steps is known before the first one, whose rates depend on it, and a run with the same plan
//! has the same bits. It is the largest one for which all parts fit into the time that is left:
//!
//! ```text
//! left ≥ steps · step + rows · row + checkpoints · checkpoint + Σ evaluations · probe + ending
//! ```
//!
//! A checkpoint is written while steps are taken and counts in full, which is an upper bound. What
//! begins later in a run, such as a second teacher, is not measured.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use networks::probe::Probe;
use ranks::communicator::Communicator;
use ranks::engine::Reduction;

use super::job::Job;
use super::journal::{embeddings, probes_left_s};
use super::metrics::metrics_row;
use super::stream::{BatchSource, Next, Stream};
use crate::checkpoint::Saver;
use crate::error::TrainError;
use crate::recipe::plan::Plan;
use crate::schedule::ScheduledValues;
use crate::step::{StepReport, Trainer, Votes};

/// Fewest steps that are timed, after the first, which warms up.
const FEWEST_STEPS: usize = 3;

/// Share of the minutes for which steps are timed.
const TIMED_SHARE: f64 = 0.02;

/// Most seconds for which steps are timed, long enough for a processor to lose the speed of its
/// first seconds.
const MOST_TIMED_S: f64 = 60.0;

/// Share of the minutes after which one timed step is enough.
const LATE_SHARE: f64 = 0.2;

/// Folder of the checkpoint that is timed. By its name, a run removes it if this process is killed.
const TIMED_CHECKPOINT: &str = ".writing-timed";

/// Times of the parts of a run in seconds, measured on its slowest rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunTimes {
    /// Mean time of a step.
    pub step_s: f64,
    /// Number of steps that were timed.
    pub n_timed: usize,
    /// Time of a row of metrics.
    pub row_s: f64,
    /// Time of a checkpoint.
    pub checkpoint_s: f64,
    /// Time of an evaluation by each probe; empty until they have been rehearsed.
    pub probes_s: Vec<f64>,
    /// Time of what follows the last step; 0 until it is known.
    pub ending_s: f64,
}

impl RunTimes {
    /// Returns the seconds of the run of `plan` after its first `done` steps, with `probes`.
    pub fn run_s(&self, plan: &Plan, probes: &[Box<dyn Probe>], done: u64) -> f64 {
        let settings = &plan.recipe.run;
        let steps_s = plan.total_steps.saturating_sub(done) as f64 * self.step_s;
        let n_rows = plan.n_due(settings.log_every_steps, done) as f64;
        let mut n_checkpoints = plan.n_due(settings.checkpoint_every_steps, done) as f64;
        // Each checkpoint restarts the clock after which another one is due.
        let clock_s = 60.0 * settings.checkpoint_every_minutes;
        if clock_s > 0.0 && clock_s < settings.checkpoint_every_steps as f64 * self.step_s {
            n_checkpoints += (steps_s / clock_s).floor();
        }
        let mut evaluations_s = probes_left_s(plan, probes, &self.probes_s, done);
        if done == 0 {
            evaluations_s += self.probes_s.iter().sum::<f64>();
        }
        let rows_s = n_rows * self.row_s;
        let checkpoints_s = n_checkpoints * self.checkpoint_s;
        steps_s + rows_s + checkpoints_s + evaluations_s + self.ending_s
    }

    /// Returns the largest number of steps after the first `done` with which the run of `plan`
    /// takes no more than `left_s`; 1 if not even one does.
    pub fn steps_within(&self, left_s: f64, plan: &Plan, probes: &[Box<dyn Probe>], done: u64) -> u64 {
        let mut candidate = plan.clone();
        let mut fits = 1;
        let mut exceeds = ((left_s / self.step_s).max(1.0) as u64).saturating_add(1);
        while exceeds - fits > 1 {
            let middle = fits + (exceeds - fits) / 2;
            candidate.total_steps = done.saturating_add(middle);
            if self.run_s(&candidate, probes, done) <= left_s {
                fits = middle;
            } else {
                exceeds = middle;
            }
        }
        fits
    }
}

/// Measures the times of steps, rows of metrics and checkpoints of the job's plan, which is to take
/// `minutes`, and returns the communicator. The batches are those of the job, with bad samples in
/// the ledger of its work directory; weights are random. All ranks call it, and get the same times.
///
/// # Errors
/// Any error that stops a run in its first steps or at a checkpoint.
pub fn measure_times(
    job: &Job<'_>,
    minutes: f64,
    comm: Communicator,
) -> Result<(RunTimes, Communicator), TrainError> {
    let start = Instant::now();
    std::fs::create_dir_all(job.workdir)
        .map_err(|error| TrainError::io("create folder", job.workdir, error))?;
    let schedules = job.plan.schedules();
    let mut trainer = job.plan.trainer(comm, &job.device)?;
    // Created before the steps, which synchronize the ranks.
    let folder = job.workdir.join("checkpoints").join(TIMED_CHECKPOINT);
    let mut saver = Saver::new(&folder, trainer.comm.topology(), 1);
    let mut stream = Stream::open(job, job.plan, &trainer)?;
    let never = AtomicBool::new(false);
    let mut next = stream.next(&never);
    let mut times_s: Vec<f64> = Vec::new();
    let mut row_s = 0.0;
    loop {
        let is_enough = are_enough(&times_s, minutes, start.elapsed().as_secs_f64());
        let Some(batch) = agree_on_batch(&trainer.comm, next, is_enough)? else { break };
        let step_start = Instant::now();
        let scheduled_values = schedules.at(trainer.state.step);
        let (gradients, _) = stream.gradients(batch, &trainer, &scheduled_values, &mut |_| {})?;
        // As in the run, the next batch is fetched before the update.
        next = stream.next(&never);
        let report = trainer.update(gradients, Votes::default(), &scheduled_values)?;
        times_s.push(step_start.elapsed().as_secs_f64());
        // The row of the first step warms up for that of the second.
        if times_s.len() <= 2 {
            row_s = time_row(&trainer, job.plan, &report, &scheduled_values)?;
        }
    }
    let checkpoint_s = time_checkpoint(&mut saver, &trainer, job.plan, &folder)?;
    let step_s = mean(&times_s[1..]);
    let times = vec![step_s, row_s, checkpoint_s];
    let slowest = trainer.comm.all_reduce("times of a run", times, Reduction::Max)?;
    let times = RunTimes {
        step_s: slowest[0],
        n_timed: times_s.len() - 1,
        row_s: slowest[1],
        checkpoint_s: slowest[2],
        ..RunTimes::default()
    };
    Ok((times, trainer.comm))
}

/// Returns whether enough steps of a run of `minutes` are timed, of which the first warms up, after
/// `elapsed_s`.
fn are_enough(times_s: &[f64], minutes: f64, elapsed_s: f64) -> bool {
    let Some((_, timed_s)) = times_s.split_first() else { return false };
    let wanted_s = (TIMED_SHARE * 60.0 * minutes).min(MOST_TIMED_S);
    let is_timed = timed_s.len() >= FEWEST_STEPS && timed_s.iter().sum::<f64>() >= wanted_s;
    let is_late = !timed_s.is_empty() && elapsed_s > LATE_SHARE * 60.0 * minutes;
    is_timed || is_late
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

/// Computes the row of metrics of the last step, and returns its seconds. All ranks call it.
fn time_row(
    trainer: &Trainer,
    plan: &Plan,
    report: &StepReport,
    scheduled_values: &ScheduledValues,
) -> Result<f64, TrainError> {
    let start = Instant::now();
    let embeddings = embeddings(trainer, plan, report)?;
    let step = trainer.state.step - 1;
    metrics_row(plan, step, scheduled_values, report, embeddings, &[], trainer.state.method.as_ref());
    Ok(start.elapsed().as_secs_f64())
}

/// Writes a checkpoint of `trainer` into `folder`, removes it, and returns its seconds. All ranks
/// call it.
fn time_checkpoint(
    saver: &mut Saver,
    trainer: &Trainer,
    plan: &Plan,
    folder: &Path,
) -> Result<f64, TrainError> {
    let start = Instant::now();
    saver.start(&trainer.state, plan);
    let (saved, failed) = saver.wait();
    let sums = trainer.comm.all_reduce("timed checkpoint", vec![saved, failed], Reduction::Sum)?;
    saver.count_votes(sums[0], sums[1])?;
    let seconds = start.elapsed().as_secs_f64();
    if trainer.comm.topology().rank == 0 {
        // What cannot be removed now, the run removes.
        let _ = std::fs::remove_dir_all(folder);
    }
    Ok(seconds)
}

/// Returns the mean of `values`, of which there is at least one.
fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[cfg(test)]
mod tests {
    use networks::Network;

    use super::*;
    use crate::conformance::plans;

    /// A probe that runs four times in a run.
    struct Quarterly;

    impl Probe for Quarterly {
        fn name(&self) -> &str {
            "quarterly"
        }

        fn interval(&self, _every_steps: u64, total_steps: u64) -> u64 {
            total_steps.div_ceil(4)
        }

        fn run(&mut self, _network: &Network, _step: u64) -> Result<Vec<(String, f64)>, String> {
            Ok(Vec::new())
        }
    }

    /// Returns a plan of `total_steps` with rows every 10 steps and checkpoints every 25.
    fn plan(total_steps: u64) -> Plan {
        let mut plan = plans(&[]).remove(0);
        plan.total_steps = total_steps;
        plan.recipe.run.log_every_steps = 10;
        plan.recipe.run.checkpoint_every_steps = 25;
        plan.recipe.run.checkpoint_every_minutes = 0.0;
        plan
    }

    fn times() -> RunTimes {
        let probes_s = vec![7.0];
        RunTimes { step_s: 2.0, n_timed: 3, row_s: 0.5, checkpoint_s: 3.0, probes_s, ending_s: 11.0 }
    }

    /// By hand: 60 steps have six rows, checkpoints after 25, 50 and 60 of them, and evaluations
    /// before the first and after every 15.
    #[test]
    fn a_run_takes_the_time_of_all_its_parts() {
        let probes: Vec<Box<dyn Probe>> = vec![Box::new(Quarterly)];
        let seconds = times().run_s(&plan(60), &probes, 0);
        assert_eq!(seconds, 60.0 * 2.0 + 6.0 * 0.5 + 3.0 * 3.0 + 5.0 * 7.0 + 11.0);
        // A fork after 30 steps has no evaluation before its first, and those after 45 and 60.
        let seconds = times().run_s(&plan(60), &probes, 30);
        assert_eq!(seconds, 30.0 * 2.0 + 3.0 * 0.5 + 2.0 * 3.0 + 2.0 * 7.0 + 11.0);
        let without_probes = RunTimes { probes_s: Vec::new(), ending_s: 0.0, ..times() };
        assert_eq!(without_probes.run_s(&plan(60), &probes, 0), 120.0 + 3.0 + 9.0);
        // A checkpoint every half minute, which is earlier than every 25 steps of 2 s.
        let mut clocked = plan(60);
        clocked.recipe.run.checkpoint_every_minutes = 0.5;
        assert_eq!(without_probes.run_s(&clocked, &probes, 0), 120.0 + 3.0 + 9.0 + 4.0 * 3.0);
    }

    #[test]
    fn the_longest_run_that_fits_is_found() {
        let probes: Vec<Box<dyn Probe>> = vec![Box::new(Quarterly)];
        for left_s in [100.0, 178.0, 1234.5, 1e5] {
            let steps = times().steps_within(left_s, &plan(1), &probes, 0);
            assert!(times().run_s(&plan(steps), &probes, 0) <= left_s, "{left_s}: {steps}");
            // With another step or two the run takes longer, whatever the rounding of intervals.
            assert!(times().run_s(&plan(steps + 8), &probes, 0) > left_s, "{left_s}: {steps}");
        }
        assert_eq!(times().steps_within(178.0, &plan(1), &probes, 0), 60);
        assert_eq!(times().steps_within(-5.0, &plan(1), &probes, 0), 1, "nothing is left");
    }

    #[test]
    fn steps_are_timed_for_a_share_of_the_time() {
        assert!(!are_enough(&[], 1.0, 0.0));
        assert!(!are_enough(&[9.0], 1.0, 59.0), "the first warms up");
        // A fiftieth of a minute is 1.2 s.
        assert!(!are_enough(&[9.0, 0.3, 0.3, 0.3], 1.0, 9.0));
        assert!(are_enough(&[9.0, 0.4, 0.4, 0.5], 1.0, 10.0));
        assert!(are_enough(&[9.0, 4.0], 1.0, 13.0), "a fifth of the time has passed");
        let minute: Vec<f64> = vec![1.0; 62];
        assert!(are_enough(&minute, 480.0, 62.0) && !are_enough(&minute[..60], 480.0, 60.0));
    }
}
