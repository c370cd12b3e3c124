//! Length in steps of a run that is given minutes.
//!
//! Steps are taken on the first batches of the run, with a row of metrics and a checkpoint. They
//! are timed and forgotten: the run begins afterwards, from its initial weights. So the number of
//! steps is known before the first one, whose rates depend on it, and a run with the same plan has
//! the same bits. It is the largest one for which all parts fit into the time that is left:
//!
//! ```text
//! left ≥ steps · step + rows · row + checkpoints · checkpoint + besides
//! step = median of the means of five blocks of the later half of the timed steps
//! ```
//!
//! The first seconds of a process are slower than those that follow: files are read for the first
//! time, memory is new, a processor changes its clock. Hence the earlier half is not counted. The
//! mean of a block counts steps that are slow every so often, which belong to a run; the median of
//! the blocks leaves out a pause of the machine, which does not. Steps are timed until the blocks
//! agree, or up to a share of the time.
//!
//! A checkpoint is written while steps are taken and counts in full, which is an upper bound; so is
//! one for every validation of a run that keeps its best weights. What begins later in a run, such
//! as a second teacher, is not measured.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use networks::probe::Probe;
use ranks::communicator::Communicator;
use ranks::engine::Reduction;

use super::job::Job;
use super::journal::{embeddings, n_rows};
use super::metrics::metrics_row;
use super::stream::{BatchSource, Next, Stream};
use crate::checkpoint::{Saver, checkpoints_folder};
use crate::error::TrainError;
use crate::recipe::plan::Plan;
use crate::schedule::ScheduledValues;
use crate::step::{StepReport, Trainer, Votes, vote};

/// Largest share of the minutes for which steps are timed.
const MOST_SHARE: f64 = 0.04;

/// Most seconds for which steps are timed.
const MOST_TIMED_S: f64 = 180.0;

/// Share of the minutes for which steps are timed if the blocks agree.
const LEAST_SHARE: f64 = 0.01;

/// Seconds for which steps are timed at least in long runs: long enough for a processor to lose the
/// speed of its first seconds.
const LEAST_TIMED_S: f64 = 60.0;

/// Fewest steps that are timed, after the first, which warms up.
const FEWEST_STEPS: usize = 4;

/// Share of the minutes after which one timed step is enough.
const LATE_SHARE: f64 = 0.1;

/// Number of blocks of the later half of the timed steps.
const N_BLOCKS: usize = 5;

/// Fewest steps of a block whose mean says something.
const FEWEST_OF_BLOCK: usize = 4;

/// Share of their median by which the means of blocks that agree differ at most.
const AGREEING: f64 = 0.02;

/// Folder of the checkpoint that is timed. By its name, a run removes it if this process is killed.
const TIMED_CHECKPOINT: &str = ".writing-timed";

/// Times of the parts of a run in seconds, measured on its slowest rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunTimes {
    /// Time of a step.
    pub step_s: f64,
    /// Number of steps that were timed.
    pub n_timed: usize,
    /// Time of a row of metrics.
    pub row_s: f64,
    /// Time of a checkpoint.
    pub checkpoint_s: f64,
}

impl RunTimes {
    /// Returns the seconds of the steps of `plan` after its first `done`, with their rows and
    /// checkpoints.
    pub fn run_s(&self, plan: &Plan, done: u64) -> f64 {
        let settings = &plan.recipe.run;
        let steps_s = plan.total_steps.saturating_sub(done) as f64 * self.step_s;
        let mut n_checkpoints = plan.n_due(settings.checkpoint_every_steps, done) as f64;
        // Each checkpoint restarts the clock after which another one is due.
        let clock_s = 60.0 * settings.checkpoint_every_minutes;
        if clock_s > 0.0 && clock_s < settings.checkpoint_every_steps as f64 * self.step_s {
            n_checkpoints += (steps_s / clock_s).floor();
        }
        let rows_s = n_rows(plan, done) as f64 * self.row_s;
        steps_s + rows_s + n_checkpoints * self.checkpoint_s
    }

    /// Returns the seconds of the checkpoints of the best weights of `plan` after its first `done`
    /// steps, which any validation by one of `probes` may be followed by.
    pub fn best_checkpoints_s(&self, plan: &Plan, probes: &[Box<dyn Probe>], done: u64) -> f64 {
        let settings = &plan.recipe.run;
        if settings.patience.is_none() {
            return 0.0;
        }
        let mut n_validations = 0;
        for probe in probes.iter().filter(|probe| probe.watched().is_some()) {
            let interval = probe.interval(settings.probe_every_steps, plan.total_steps);
            n_validations += plan.n_due(interval, done);
        }
        n_validations as f64 * self.checkpoint_s
    }

    /// Returns a number of steps after the first `done` with which the run of `plan` takes no more
    /// than `left_s`, the largest one if more steps always take longer; 1 if not even one does.
    /// `besides_s` returns the seconds of what a plan has besides its steps, rows and checkpoints.
    pub fn steps_within(&self, left_s: f64, plan: &Plan, done: u64, besides_s: &dyn Fn(&Plan) -> f64) -> u64 {
        let mut candidate = plan.clone();
        let mut fits = 1;
        let mut exceeds = ((left_s / self.step_s).max(1.0) as u64).saturating_add(1);
        while exceeds - fits > 1 {
            let middle = fits + (exceeds - fits) / 2;
            candidate.total_steps = done.saturating_add(middle);
            if self.run_s(&candidate, done) + besides_s(&candidate) <= left_s {
                fits = middle;
            } else {
                exceeds = middle;
            }
        }
        fits
    }
}

/// Measures the times of steps, rows of metrics and checkpoints of the job's plan, which is to take
/// `minutes`, and returns them with the communicator; no times if the job was asked to stop. The
/// batches are those of the job, with bad samples in the ledger of its work directory; weights are
/// random. All ranks call it, and get the same times.
///
/// # Errors
/// Any error that stops a run in its first steps or at a checkpoint.
pub fn measure_times(
    job: &Job<'_>,
    minutes: f64,
    comm: Communicator,
) -> Result<(Option<RunTimes>, Communicator), TrainError> {
    let start = Instant::now();
    std::fs::create_dir_all(job.workdir)
        .map_err(|error| TrainError::io("create folder", job.workdir, error))?;
    let schedules = job.plan.schedules();
    let mut trainer = job.plan.trainer(comm, &job.device)?;
    // Created before the steps, which synchronize the ranks.
    let folder = checkpoints_folder(job.workdir).join(TIMED_CHECKPOINT);
    let mut saver = Saver::new(&folder, trainer.comm.topology(), 1);
    let mut stream = Stream::open(job, job.plan, &trainer)?;
    let mut next = stream.next(job.stop);
    let mut times_s: Vec<f64> = Vec::new();
    let mut row_s = 0.0;
    loop {
        let is_enough = are_enough(&times_s, minutes, start.elapsed().as_secs_f64());
        let batch = match agree(&trainer.comm, next, is_enough, job.stop)? {
            Agreed::Step(batch) => batch,
            Agreed::Enough => break,
            Agreed::Stopped => return Ok((None, trainer.comm)),
        };
        let step_start = Instant::now();
        let scheduled_values = schedules.at(trainer.state.step);
        let (gradients, _) = stream.gradients(batch, &trainer, &scheduled_values, &mut |_| {})?;
        // As in the run, the next batch is fetched before the update.
        next = stream.next(job.stop);
        let report = trainer.update(gradients, Votes::default(), &scheduled_values)?;
        times_s.push(step_start.elapsed().as_secs_f64());
        // The row of the first step warms up for that of the second.
        if times_s.len() <= 2 {
            row_s = time_row(&trainer, job.plan, &report, &scheduled_values)?;
        }
    }
    let checkpoint_s = time_checkpoint(&mut saver, &trainer, job.plan, &folder)?;
    let timed_s = &times_s[1..];
    let times = vec![settled_s(timed_s), row_s, checkpoint_s];
    let slowest = trainer.comm.all_reduce("times of a run", times, Reduction::Max)?;
    let times =
        RunTimes { step_s: slowest[0], n_timed: timed_s.len(), row_s: slowest[1], checkpoint_s: slowest[2] };
    Ok((Some(times), trainer.comm))
}

/// Returns whether enough steps of a run of `minutes` are timed, of which the first warms up, after
/// `elapsed_s`.
fn are_enough(times_s: &[f64], minutes: f64, elapsed_s: f64) -> bool {
    let Some((_, timed_s)) = times_s.split_first() else { return false };
    let run_s = 60.0 * minutes;
    if elapsed_s > LATE_SHARE * run_s && !timed_s.is_empty() {
        return true;
    }
    let spent_s: f64 = timed_s.iter().sum();
    let least_s = (LEAST_SHARE * run_s).min(LEAST_TIMED_S);
    let most_s = (MOST_SHARE * run_s).min(MOST_TIMED_S);
    (timed_s.len() >= FEWEST_STEPS && spent_s >= most_s) || (spent_s >= least_s && blocks_agree(timed_s))
}

/// Returns whether the blocks of the later half of `timed_s` have about the same means.
fn blocks_agree(timed_s: &[f64]) -> bool {
    let later_s = later_half(timed_s);
    if later_s.len() < N_BLOCKS * FEWEST_OF_BLOCK {
        return false;
    }
    let means = sorted_means(later_s);
    means[N_BLOCKS - 1] - means[0] <= AGREEING * means[N_BLOCKS / 2]
}

/// Returns the time of a step from those of `timed_s`, of which there is at least one: the median
/// of the means of blocks of the later half.
fn settled_s(timed_s: &[f64]) -> f64 {
    let means = sorted_means(later_half(timed_s));
    means[means.len() / 2]
}

/// Returns the later half of `timed_s`, with the step in the middle if their number is odd.
fn later_half(timed_s: &[f64]) -> &[f64] {
    &timed_s[timed_s.len() / 2..]
}

/// Returns the means of [`N_BLOCKS`] blocks of `times_s`, in ascending order; of as many as there
/// are steps, if these are fewer.
fn sorted_means(times_s: &[f64]) -> Vec<f64> {
    let n_blocks = N_BLOCKS.min(times_s.len());
    let mut means = Vec::with_capacity(n_blocks);
    for block in 0..n_blocks {
        let start = block * times_s.len() / n_blocks;
        let end = (block + 1) * times_s.len() / n_blocks;
        means.push(times_s[start..end].iter().sum::<f64>() / (end - start) as f64);
    }
    means.sort_by(f64::total_cmp);
    means
}

/// What follows in a measurement, on which all ranks agree.
enum Agreed {
    Step(BatchSource),
    /// Rank 0 finds that enough steps were timed.
    Enough,
    /// A rank was asked to stop.
    Stopped,
}

/// Returns what follows, if all ranks have their batch in `next`. All ranks call it.
fn agree(comm: &Communicator, next: Next, is_enough: bool, stop: &AtomicBool) -> Result<Agreed, TrainError> {
    let is_first = comm.topology().rank == 0;
    let is_stopped = matches!(next, Next::Stopped) || stop.load(Ordering::Relaxed);
    let votes = vec![vote(matches!(next, Next::Failed(_))), vote(is_stopped), vote(is_first && is_enough)];
    let sums = comm.all_reduce("measured step", votes, Reduction::Sum)?;
    match next {
        Next::Failed(error) => Err(error),
        _ if sums[0] > 0.0 => Err(TrainError::PeersFailed { n_ranks: sums[0] as usize }),
        _ if sums[1] > 0.0 => Ok(Agreed::Stopped),
        _ if sums[2] > 0.0 => Ok(Agreed::Enough),
        Next::Batch(batch) => Ok(Agreed::Step(batch)),
        // It has voted for that.
        Next::Stopped => Ok(Agreed::Stopped),
    }
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

#[cfg(test)]
mod tests {
    use networks::probe::WatchedScore;
    use networks::{NamedTensor, Network};

    use super::*;
    use crate::conformance::plans;

    /// A probe that runs four times in a run.
    struct Quarterly {
        is_watched: bool,
    }

    impl Probe for Quarterly {
        fn name(&self) -> &str {
            "quarterly"
        }

        fn interval(&self, _every_steps: u64, total_steps: u64) -> u64 {
            total_steps.div_ceil(4)
        }

        fn watched(&self) -> Option<WatchedScore> {
            self.is_watched.then(WatchedScore::default)
        }

        fn run(
            &mut self,
            _network: &Network,
            _heads: &[NamedTensor],
            _step: u64,
        ) -> Result<Vec<(String, f64)>, String> {
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
        RunTimes { step_s: 2.0, n_timed: 3, row_s: 0.5, checkpoint_s: 3.0 }
    }

    /// Returns 11 s, and 7 s for each quarter of the run.
    fn besides_s(plan: &Plan) -> f64 {
        11.0 + 7.0 * plan.n_due(plan.total_steps.div_ceil(4), 0) as f64
    }

    /// By hand: 60 steps have rows after 1, 2, 4 and 8 steps and six at intervals, and checkpoints
    /// after 25, 50 and 60.
    #[test]
    fn a_run_takes_the_time_of_its_steps_rows_and_checkpoints() {
        assert_eq!(times().run_s(&plan(60), 0), 60.0 * 2.0 + 10.0 * 0.5 + 3.0 * 3.0);
        // A fork after 30 steps has rows after 40, 50 and 60.
        assert_eq!(times().run_s(&plan(60), 30), 30.0 * 2.0 + 3.0 * 0.5 + 2.0 * 3.0);
        // A run of three steps has a row of each.
        assert_eq!(times().run_s(&plan(3), 0), 3.0 * 2.0 + 3.0 * 0.5 + 3.0);
        // A checkpoint every half minute, which is earlier than every 25 steps of 2 s.
        let mut clocked = plan(60);
        clocked.recipe.run.checkpoint_every_minutes = 0.5;
        assert_eq!(times().run_s(&clocked, 0), 120.0 + 5.0 + 9.0 + 4.0 * 3.0);
    }

    /// A run that keeps its best weights may save them after each of four validations.
    #[test]
    fn checkpoints_of_the_best_weights_are_counted() {
        let watched: Vec<Box<dyn Probe>> = vec![Box::new(Quarterly { is_watched: true })];
        let unwatched: Vec<Box<dyn Probe>> = vec![Box::new(Quarterly { is_watched: false })];
        let mut patient = plan(60);
        assert_eq!(times().best_checkpoints_s(&patient, &watched, 0), 0.0);
        patient.recipe.run.patience = Some(3);
        assert_eq!(times().best_checkpoints_s(&patient, &watched, 0), 4.0 * 3.0);
        assert_eq!(times().best_checkpoints_s(&patient, &watched, 30), 2.0 * 3.0);
        assert_eq!(times().best_checkpoints_s(&patient, &unwatched, 0), 0.0);
    }

    #[test]
    fn the_longest_run_that_fits_is_found() {
        for left_s in [100.0, 173.0, 1234.5, 1e5] {
            let steps = times().steps_within(left_s, &plan(1), 0, &besides_s);
            let run_s = times().run_s(&plan(steps), 0) + besides_s(&plan(steps));
            assert!(run_s <= left_s, "{left_s}: {steps}");
            // With another step or two the run takes longer, whatever the rounding of intervals.
            let longer_s = times().run_s(&plan(steps + 8), 0) + besides_s(&plan(steps + 8));
            assert!(longer_s > left_s, "{left_s}: {steps}");
        }
        // 60 steps take 134 s, and 39 s besides.
        assert_eq!(times().steps_within(173.0, &plan(1), 0, &besides_s), 60);
        assert_eq!(times().steps_within(-5.0, &plan(1), 0, &besides_s), 1, "nothing is left");
    }

    /// The earlier half is slow, and the machine has paused once.
    #[test]
    fn a_step_is_timed_by_steps_that_have_settled() {
        let mut timed_s = vec![0.5; 50];
        timed_s.extend(vec![0.1; 50]);
        assert!((settled_s(&timed_s) - 0.1).abs() < 1e-12);
        timed_s[77] = 30.0;
        assert!((settled_s(&timed_s) - 0.1).abs() < 1e-12, "a pause is no part of a step");
        // Every fifth step waits, as it will in the run.
        let waits: Vec<f64> = (0..100).map(|step| if step % 5 == 0 { 0.6 } else { 0.1 }).collect();
        assert!((settled_s(&waits) - 0.2).abs() < 1e-12);
        assert_eq!(settled_s(&[7.0]), 7.0);
        assert_eq!(settled_s(&[9.0, 7.0]), 7.0);
        assert_eq!(settled_s(&[9.0, 9.0, 1.0, 2.0, 3.0]), 2.0);
    }

    #[test]
    fn steps_are_timed_until_they_agree_or_for_a_share_of_the_time() {
        assert!(!are_enough(&[], 1.0, 0.0));
        assert!(!are_enough(&[9.0], 1.0, 59.0), "the first warms up");
        assert!(are_enough(&[9.0, 4.0], 1.0, 13.0), "a tenth of the time has passed");
        assert!(!are_enough(&[1.0, 1.3, 1.3], 1.0, 3.6), "too few");
        // The share of a minute is 2.4 s at most, and 0.6 s if the steps agree.
        assert!(are_enough(&[1.0, 0.6, 0.7, 0.6, 0.7], 1.0, 3.6));
        let calm = vec![0.02; 41];
        assert!(are_enough(&calm, 1.0, 1.0) && !are_enough(&calm[..39], 1.0, 1.0));
        let falling: Vec<f64> = (0..41).map(|step| 0.03 - 0.0002 * f64::from(step)).collect();
        assert!(!are_enough(&falling, 1.0, 1.2));
        assert!(are_enough(&[falling, vec![0.02; 61]].concat(), 1.0, 2.5));
        // In a run of eight hours, a minute if the steps agree, and else three.
        let minute = vec![1.0; 61];
        assert!(are_enough(&minute, 480.0, 61.0) && !are_enough(&minute[..60], 480.0, 60.0));
        let uneven: Vec<f64> = (0..181).map(|step| if step / 18 % 2 == 0 { 1.0 } else { 1.1 }).collect();
        assert!(are_enough(&uneven, 480.0, 190.0) && !are_enough(&uneven[..150], 480.0, 160.0));
    }
}
