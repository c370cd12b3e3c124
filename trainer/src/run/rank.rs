//! The training loop of one rank. Decisions on which all ranks must agree follow from the votes of
//! all of them, which are summed in the all-reduce of a step or in a separate collective.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kernels::product_kernels;
use networks::probe::Probe;
use ranks::communicator::Communicator;
use ranks::engine::Reduction;

use super::heartbeat::{self, HeartbeatWriter, RankWatch};
use super::job::{Job, Observer, Outcome};
use super::journal::{Journal, StepTime, is_validation_due};
use super::stream::{BatchSource, Next, Stream};
use super::validations::Validations;
use super::workdir::{self, AllowedDifferences};
use crate::checkpoint::{self, Saver};
use crate::error::TrainError;
use crate::recipe::plan::Plan;
use crate::recipe::warnings::warnings;
use crate::schedule::Schedules;
use crate::step::{StepReport, Trainer, Votes, vote};

/// Number of steps between checks of a product on the data of the run.
const STEPS_BETWEEN_CHECKS: u64 = 1000;

/// Steps in a row that may be skipped before the run goes back to its last checkpoint, or stops.
const MAX_BAD_STEPS: u32 = 3;

/// A run in progress.
pub(super) struct Run<'a> {
    job: &'a Job<'a>,
    plan: Plan,
    schedules: Schedules,
    trainer: Trainer,
    saver: Saver,
    heartbeat: HeartbeatWriter,
    journal: Journal,
    stream: Stream,
    /// Numbers by which the run is validated, on rank 0.
    validations: Option<Validations>,
    /// Whether the run ends after the step that it has just taken, although steps are left.
    ends_early: bool,
    /// Whether rank 0 has no number of a validation that was due after the last step. Nothing is
    /// saved after it, so that a run that resumes measures it again.
    has_lost_validation: bool,
    saved_step: u64,
    last_save: Instant,
    n_rollbacks: u64,
    /// Error on this rank alone since the last vote. All ranks leave together after it, with a
    /// checkpoint.
    failure: Option<TrainError>,
    /// Step at which this process began.
    first: u64,
    /// Rank 0's claim on the work directory.
    lock: Option<File>,
}

impl<'a> Run<'a> {
    /// Claims the work directory and restores the state of the run. All ranks call it.
    pub(super) fn open(
        job: &'a Job<'a>,
        comm: Communicator,
        observer: &mut dyn Observer,
    ) -> Result<Self, TrainError> {
        job.plan.check_measured()?;
        let warn = &mut |message: &str| observer.warned(message);
        let allowed = AllowedDifferences { lengthen: job.lengthen, forked_step: job.forked_step };
        let (plan, lock) = workdir::agree(job.workdir, job.plan, allowed, &comm, warn)?;
        let heartbeats = heartbeat::heartbeat_folder(job.workdir);
        let heartbeat = HeartbeatWriter::start(&heartbeats, comm.topology().rank, comm.recorder())?;
        let restored = restore(job, &plan, &heartbeats, comm, observer);
        let Restored { trainer, saver, validations, journal, stream } =
            restored.inspect_err(|error| heartbeat.give_up(error))?;
        let first = trainer.state.step;
        Ok(Self {
            schedules: plan.schedules(),
            plan,
            job,
            trainer,
            saver,
            heartbeat,
            journal,
            stream,
            validations,
            ends_early: false,
            has_lost_validation: false,
            saved_step: first,
            last_save: Instant::now(),
            n_rollbacks: 0,
            failure: None,
            first,
            lock,
        })
    }

    /// Takes the remaining steps.
    pub(super) fn train(
        mut self,
        probes: &mut [Box<dyn Probe>],
        observer: &mut dyn Observer,
    ) -> Result<Outcome, TrainError> {
        let result = self.take_steps(probes, observer);
        if let Err(error) = &result {
            self.heartbeat.give_up(error);
        }
        result
    }

    fn take_steps(
        &mut self,
        probes: &mut [Box<dyn Probe>],
        observer: &mut dyn Observer,
    ) -> Result<Outcome, TrainError> {
        if self.trainer.state.step >= self.plan.total_steps {
            let written = self.write_validations(false);
            self.leave()?;
            written?;
            return Ok(Outcome::Finished);
        }
        let knows_end = self.watch_validation(probes, observer);
        if self.has_ended_early(probes, knows_end)? {
            return self.finish();
        }
        if self.trainer.state.step == 0 {
            let Self { journal, trainer, plan, heartbeat, .. } = self;
            match journal.probe_start(trainer, plan, probes, heartbeat, observer) {
                // Ranks that have lost one another cannot vote.
                Err(error @ TrainError::Ranks(_)) => return Err(error),
                // The ranks vote on it with the first batch.
                Err(error) => self.failure = Some(error),
                Ok(()) => {}
            }
        }
        let (mut next, mut agreed) = self.first_batch()?;
        loop {
            let batch = match next {
                Next::Batch(batch) if agreed.stop == 0.0 && agreed.failed == 0.0 => batch,
                next => return self.end_early(next, agreed, observer),
            };
            let report;
            (report, next) = self.step(batch, probes, observer)?;
            agreed = report.votes;
            if agreed.wrong > 0.0 {
                return self.end_wrong();
            }
            if self.ends_early || self.trainer.state.step == self.plan.total_steps {
                // As many as would cause a rollback, or all steps of a run that has fewer.
                let n_steps = self.trainer.state.bad_steps;
                if u64::from(n_steps) >= self.plan.total_steps.min(u64::from(MAX_BAD_STEPS)) {
                    let step = self.trainer.state.step - 1;
                    return self.end_together(TrainError::NotFinite { step, n_steps });
                }
                if !self.has_lost_validation {
                    self.save()?;
                }
                self.finish_saving()?;
                return self.finish();
            }
            let continues = agreed.stop == 0.0 && agreed.failed == 0.0;
            if continues && self.trainer.state.bad_steps >= MAX_BAD_STEPS {
                self.roll_back(observer)?;
                (next, agreed) = self.first_batch()?;
            }
        }
    }

    /// Begins to watch the number of `probes` by which the run is validated. Returns whether the
    /// run has ended early before, as far as this rank knows: rank 0 has the numbers. A failure to
    /// write them is kept for the next vote.
    fn watch_validation(&mut self, probes: &[Box<dyn Probe>], observer: &mut dyn Observer) -> bool {
        let watched = probes.iter().find_map(|probe| probe.watched());
        let is_watched = watched.is_some();
        let mut has_ended = false;
        if let Some(validations) = &mut self.validations
            && let Some(watched) = watched
        {
            // A run that has ended stays ended, whatever it is scored on now.
            has_ended = validations.end_step().is_some();
            if !has_ended && validations.watch(watched) {
                observer.warned(&format!(
                    "the run was validated on other images before: those numbers are not compared with {} on \
                     {}",
                    validations.score, validations.images
                ));
                self.saver.keep(validations.kept_step());
            }
        }
        self.failure = self.write_validations(is_watched).err();
        has_ended
    }

    /// Returns whether the run has ended early before: whether some rank `knows` that. All ranks
    /// call it.
    fn has_ended_early(&self, probes: &[Box<dyn Probe>], knows: bool) -> Result<bool, TrainError> {
        let is_watched = probes.iter().any(|probe| probe.watched().is_some());
        if !is_watched || self.plan.recipe.run.patience.is_none() {
            return Ok(false);
        }
        Ok(self.trainer.comm.count("validations", knows)? > 0)
    }

    /// Writes the numbers by which the run is validated, on rank 0: with the patience of this
    /// start, also if no probe measures them any more. Writes nothing if there are none, unless
    /// `is_watched`.
    fn write_validations(&self, is_watched: bool) -> Result<(), TrainError> {
        match &self.validations {
            Some(validations) if is_watched || !validations.numbers.is_empty() => {
                validations.write(self.job.workdir)
            }
            _ => Ok(()),
        }
    }

    /// Adds `value`, the number that the run watches, if it was due after the last step, and
    /// returns whether it is the best so far: then all ranks save. Decides whether the run ends
    /// early, and whether the number is lost. All ranks call it; rank 0 knows the number.
    fn count_validation(
        &mut self,
        probes: &[Box<dyn Probe>],
        value: Option<f64>,
    ) -> Result<bool, TrainError> {
        let done = self.trainer.state.step;
        if !is_validation_due(&self.plan, probes, done) {
            return Ok(false);
        }
        let mut is_best = false;
        let mut ends_early = false;
        let mut is_lost = false;
        if let Some(validations) = &mut self.validations {
            match value {
                Some(value) if self.failure.is_none() => {
                    validations.add(done, value);
                    is_best = validations.kept_step() == Some(done);
                    ends_early = validations.end_step().is_some();
                    self.saver.keep(validations.kept_step());
                    self.failure = validations.write(self.job.workdir).err();
                    is_lost = self.failure.is_some();
                }
                // Without a failure the probe has no such number, and would have none again.
                _ => is_lost = self.failure.is_some(),
            }
        }
        let votes = vec![vote(is_best), vote(ends_early), vote(is_lost)];
        let agreed = self.trainer.comm.all_reduce("validation", votes, Reduction::Sum)?;
        self.has_lost_validation = agreed[2] > 0.0;
        self.ends_early = agreed[1] > 0.0;
        Ok(agreed[0] > 0.0)
    }

    /// Waits for the first batch of a stream, and votes on whether all ranks have theirs.
    fn first_batch(&mut self) -> Result<(Next, Votes), TrainError> {
        self.heartbeat.enter(self.trainer.state.step, "data");
        let next = self.stream.next(self.job.stop);
        let votes = self.votes(&next);
        let votes = vec![votes.stop, votes.failed];
        let sums = self.trainer.comm.all_reduce("first batch", votes, Reduction::Sum)?;
        Ok((next, Votes { stop: sums[0], failed: sums[1], ..Votes::default() }))
    }

    /// Enters a phase of `step`: updates the heartbeat, and triggers the fault of a drill.
    fn enter(&self, step: u64, phase: &'static str) {
        self.heartbeat.enter(step, phase);
        if let Some(fault) = &self.job.fault {
            fault.trigger(self.trainer.topology().rank, step, phase);
        }
    }

    /// Takes one step, reports it, starts a checkpoint if one is due, and waits for the next batch.
    fn step(
        &mut self,
        batch: BatchSource,
        probes: &mut [Box<dyn Probe>],
        observer: &mut dyn Observer,
    ) -> Result<(StepReport, Next), TrainError> {
        let start = Instant::now();
        let step = self.trainer.state.step;
        let scheduled_values = self.schedules.at(step);
        let rank = self.trainer.topology().rank;
        product_kernels::begin_step();
        if step > 0 && step.is_multiple_of(STEPS_BETWEEN_CHECKS) {
            product_kernels::check_one(step / STEPS_BETWEEN_CHECKS);
        }
        let computed = self.stream.gradients(batch, &self.trainer, &scheduled_values, &mut |phase| {
            self.enter(step, phase);
        });
        let (mut gradients, upload_wait_ms) = computed?;
        // By index of the batch, because a rollback skips the batches with the fault.
        let batch_number = step + self.trainer.state.skipped_batches;
        if let Some(fault) = &self.job.fault
            && fault.makes_nan(rank, batch_number)
        {
            gradients.fill_nan();
        }
        // The next batch is fetched before the votes of this step, so that these include it.
        self.enter(step, "data");
        let waiting = Instant::now();
        let next =
            if step + 1 == self.plan.total_steps { Next::Stopped } else { self.stream.next(self.job.stop) };
        let data_wait_ms = waiting.elapsed().as_secs_f64() * 1e3 + upload_wait_ms;
        self.enter(step, "update");
        let votes = self.votes(&next);
        let report = self.trainer.update(gradients, votes, &scheduled_values)?;
        self.saver.count_votes(report.votes.saved, report.votes.save_failed)?;
        if report.votes.wrong > 0.0 {
            return Ok((report, next));
        }
        let time = StepTime { seconds: start.elapsed().as_secs_f64(), data_wait_ms };
        let Self { journal, trainer, plan, heartbeat, .. } = self;
        let reported = journal
            .report_kernels(step, rank, observer)
            .and_then(|()| journal.report_step(trainer, plan, &report, time, probes, observer));
        let logged =
            journal.log(trainer, plan, &report, &scheduled_values, time, probes, heartbeat, observer);
        let workdir_check = workdir::check(self.job.workdir, self.lock.as_ref());
        let watched = logged.as_ref().ok().copied().flatten();
        if let Err(error) = workdir_check.and(logged).and(reported) {
            match error {
                // Ranks that have lost one another cannot vote.
                TrainError::Ranks(_) => return Err(error),
                error => self.failure = Some(error),
            }
        }
        // A step that was skipped has the weights of the one before.
        let is_best = report.finite && self.count_validation(probes, watched)?;
        let done = self.trainer.state.step;
        let every_steps = self.plan.recipe.run.checkpoint_every_steps;
        let is_due = is_best || done.is_multiple_of(every_steps) || report.votes.due > 0.0;
        if is_due && report.finite && !self.has_lost_validation {
            self.enter(step, "checkpoint");
            self.save()?;
        }
        Ok((report, next))
    }

    /// Returns the votes of this rank.
    fn votes(&mut self, next: &Next) -> Votes {
        let (saved, save_failed) = self.saver.vote();
        Votes {
            stop: vote(self.job.stop.load(Ordering::Relaxed)),
            failed: vote(matches!(next, Next::Failed(_)) || self.failure.is_some()),
            saved,
            save_failed,
            due: vote(self.is_due()),
            wrong: vote(product_kernels::wrong().is_some()),
        }
    }

    /// Returns whether a checkpoint is due by the clock of rank 0.
    fn is_due(&self) -> bool {
        let minutes = self.plan.recipe.run.checkpoint_every_minutes;
        let is_first = self.trainer.topology().rank == 0;
        is_first && minutes > 0.0 && self.last_save.elapsed().as_secs_f64() >= 60.0 * minutes
    }

    /// Starts a checkpoint, unless this step is already saved, after waiting for an earlier one.
    fn save(&mut self) -> Result<(), TrainError> {
        if self.saved_step == self.trainer.state.step {
            return Ok(());
        }
        self.finish_saving()?;
        // If the folder is missing, a checkpoint would create it again, where nobody looks for it.
        let workdir_check = workdir::check(self.job.workdir, self.lock.as_ref());
        // All ranks write, or none does.
        let n_missing = self.trainer.comm.count("work directory", workdir_check.is_err())?;
        workdir_check?;
        if n_missing > 0 {
            return Err(TrainError::WorkdirMissing { workdir: self.job.workdir.to_path_buf() });
        }
        self.saver.start(&self.trainer.state, &self.plan);
        self.saved_step = self.trainer.state.step;
        self.last_save = Instant::now();
        Ok(())
    }

    /// Waits until the checkpoint that is being written, if any, is complete on all ranks.
    fn finish_saving(&mut self) -> Result<(), TrainError> {
        if self.saver.is_busy() {
            self.heartbeat.enter(self.trainer.state.step, "checkpoint");
            let (saved, failed) = self.saver.wait();
            let sums = self.trainer.comm.all_reduce("checkpoint", vec![saved, failed], Reduction::Sum)?;
            self.saver.count_votes(sums[0], sums[1])?;
        }
        Ok(())
    }

    /// Rolls back to the newest checkpoint and skips the batches since then.
    fn roll_back(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        self.finish_saving()?;
        let state_device = self.trainer.state_device().clone();
        let state = &mut self.trainer.state;
        let step = state.step - 1;
        let next_batch = state.step + state.skipped_batches;
        let not_finite = TrainError::NotFinite { step, n_steps: MAX_BAD_STEPS };
        if self.n_rollbacks == self.plan.recipe.run.max_rollbacks {
            return self.end_together(not_finite);
        }
        let rank = self.trainer.comm.topology().rank;
        let folder = checkpoint::checkpoints_folder(self.job.workdir);
        let warn = &mut |message: &str| warn_on_first(rank, message, observer);
        let newest = Some(state.step);
        let resumed = checkpoint::resume(&folder, newest, state, &self.trainer.comm, &state_device, warn)?;
        let Some(back_to) = resumed else { return self.end_together(not_finite) };
        self.n_rollbacks += 1;
        state.skipped_batches = next_batch - back_to;
        state.bad_steps = 0;
        self.saved_step = back_to;
        let reason = format!(
            "step {step}: {MAX_BAD_STEPS} steps in a row were not finite; returning to step {back_to} and \
             skipping the batches up to {}",
            next_batch - 1
        );
        if rank == 0 {
            observer.warned(&reason);
        }
        self.journal.roll_back(self.job.workdir, step, back_to, reason)?;
        if let Some(validations) = &mut self.validations {
            validations.go_back_to(back_to);
            self.saver.keep(validations.kept_step());
        }
        self.stream = Stream::open(self.job, &self.plan, &self.trainer)?;
        Ok(())
    }

    /// Ends the run because a rank was asked to stop or has no batch, after all ranks have saved.
    fn end_early(
        &mut self,
        next: Next,
        agreed: Votes,
        observer: &mut dyn Observer,
    ) -> Result<Outcome, TrainError> {
        let saved = if self.has_lost_validation { Ok(()) } else { self.save() };
        let saved = saved.and_then(|()| self.finish_saving());
        let next = self.failure.take().map_or(next, Next::Failed);
        match next {
            Next::Failed(error) => {
                if let Err(error) = saved {
                    observer.warned(&error.to_string());
                }
                // The others leave together with this one.
                let _ = self.leave();
                Err(error)
            }
            _ if agreed.failed > 0.0 => {
                let _ = self.leave();
                Err(TrainError::PeersFailed { n_ranks: agreed.failed as usize })
            }
            _ => {
                saved?;
                self.leave()?;
                Ok(Outcome::Stopped)
            }
        }
    }

    /// Leaves together with all other ranks.
    fn leave(&mut self) -> Result<(), TrainError> {
        Ok(std::mem::replace(&mut self.trainer.comm, Communicator::solo()).finish()?)
    }

    /// Ends the run after its last step: ranks exchange failures since the last vote, and then
    /// leave.
    fn finish(&mut self) -> Result<Outcome, TrainError> {
        let n_ranks = self.trainer.comm.count("failures", self.failure.is_some())?;
        self.leave()?;
        match self.failure.take() {
            Some(error) => Err(error),
            None if n_ranks > 0 => Err(TrainError::PeersFailed { n_ranks }),
            None => Ok(Outcome::Finished),
        }
    }

    /// Ends the run because a product has become wrong on some rank, without saving weights that
    /// may be computed from it.
    fn end_wrong<T>(&mut self) -> Result<T, TrainError> {
        let wrong_product = product_kernels::wrong();
        // Sizes are checked when the process first uses them, and then in some of the checks.
        let last_right = match &wrong_product {
            Some(wrong) => (wrong.last_right * STEPS_BETWEEN_CHECKS).max(self.first),
            None => self.first,
        };
        let folder = checkpoint::checkpoints_folder(self.job.workdir);
        let saved_steps = checkpoint::steps(&folder).into_iter().map(|(step, _)| step);
        let good = saved_steps.filter(|step| *step <= last_right).max();
        let what = match wrong_product {
            Some(wrong) => wrong.what,
            None => "another rank found a wrong product".into(),
        };
        let step = self.trainer.state.step - 1;
        self.end_together(TrainError::WrongProduct { step, last_right, good, what })
    }

    /// Ends the run with an error that all ranks have in common.
    fn end_together<T>(&mut self, error: TrainError) -> Result<T, TrainError> {
        // A rank that exits alone makes the launcher abort the job.
        let _ = self.leave();
        Err(error)
    }
}

/// State of a run that is restored when its process starts.
struct Restored {
    trainer: Trainer,
    saver: Saver,
    /// Numbers by which the run is validated, on rank 0.
    validations: Option<Validations>,
    journal: Journal,
    stream: Stream,
}

/// Restores the state of the run of `plan`, whose ranks watch one another by the files in
/// `heartbeats`. All ranks call it.
fn restore(
    job: &Job<'_>,
    plan: &Plan,
    heartbeats: &Path,
    comm: Communicator,
    observer: &mut dyn Observer,
) -> Result<Restored, TrainError> {
    let topology = comm.topology();
    if topology.world_size > 1 {
        comm.set_watch(Arc::new(RankWatch::new(heartbeats, &comm)?));
    }
    let mut trainer = plan.trainer(comm, &job.device)?;
    for warning in &warnings(plan) {
        warn_on_first(topology.rank, warning, observer);
    }
    if let Some(warning) = job.fault.as_ref().and_then(|fault| fault.misses(plan)) {
        warn_on_first(topology.rank, &warning, observer);
    }
    restore_weights(job, plan, &mut trainer, observer)?;
    let first = trainer.state.step;
    let folder = checkpoint::checkpoints_folder(job.workdir);
    let mut saver = Saver::new(&folder, topology, plan.recipe.run.keep_checkpoints);
    let mut validations = None;
    if topology.rank == 0 {
        validations = Some(restore_validations(job, plan, first, &mut saver, observer)?);
    }
    observer.started(first, plan.total_steps);
    let journal = Journal::open(job.workdir, plan, &job.dataset, topology.rank, first)?;
    let stream = Stream::open(job, plan, &trainer)?;
    Ok(Restored { trainer, saver, validations, journal, stream })
}

/// Restores the state of the newest checkpoint, or else the initial weights, and the weights of
/// frozen networks. All ranks call it.
fn restore_weights(
    job: &Job<'_>,
    plan: &Plan,
    trainer: &mut Trainer,
    observer: &mut dyn Observer,
) -> Result<(), TrainError> {
    let rank = trainer.topology().rank;
    let folder = checkpoint::checkpoints_folder(job.workdir);
    let state_device = trainer.state_device().clone();
    let warn = &mut |message: &str| warn_on_first(rank, message, observer);
    let state = &mut trainer.state;
    let resumed = checkpoint::resume(&folder, None, state, &trainer.comm, &state_device, warn)?;
    if resumed.is_none()
        && let Some(initial) = job.initial
    {
        let has_heads = plan.recipe.init.as_ref().is_some_and(|init| init.heads);
        trainer.start_from(initial, has_heads)?;
    }
    for frozen in job.frozen {
        trainer.load_frozen(frozen.name, &frozen.weights)?;
    }
    Ok(())
}

/// Restores the numbers by which the run is validated, of the first `first` steps, and has `saver`
/// keep the weights of the best. Rank 0 calls it.
fn restore_validations(
    job: &Job<'_>,
    plan: &Plan,
    first: u64,
    saver: &mut Saver,
    observer: &mut dyn Observer,
) -> Result<Validations, TrainError> {
    let folder = checkpoint::checkpoints_folder(job.workdir);
    let mut validations = Validations::read(job.workdir)?.unwrap_or_default();
    validations.patience = plan.recipe.run.patience;
    validations.go_back_to(first);
    if let Some(lost) = validations.forget_if_not_kept(&folder, first) {
        observer.warned(&lost);
    }
    saver.keep(validations.kept_step());
    if first > 0 {
        // A run that was killed between a checkpoint and the pruning left one too many.
        checkpoint::prune(&folder, first, plan.recipe.run.keep_checkpoints, validations.kept_step());
    }
    Ok(validations)
}

/// Warns the observer of rank 0.
fn warn_on_first(rank: usize, message: &str, observer: &mut dyn Observer) {
    if rank == 0 {
        observer.warned(message);
    }
}
