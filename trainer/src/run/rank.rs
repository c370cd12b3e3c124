//! The loop of one rank. Decisions that ranks must take alike follow from the votes of all of them:
//! in the step's all-reduce, or in a collective of their own.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kernels::products;
use networks::probe::Probe;
use ranks::communicator::Communicator;
use ranks::engine::Reduction;

use super::heartbeat::{self, HeartbeatWriter, RankWatch};
use super::job::{Job, Observer, Outcome};
use super::journal::{Journal, StepTime};
use super::stream::{BatchSource, Next, Stream};
use super::workdir::{self, AllowedDifferences};
use crate::checkpoint::{self, Saver};
use crate::error::TrainError;
use crate::recipe::plan::Plan;
use crate::recipe::warnings::warnings;
use crate::schedule::Schedules;
use crate::step::{StepReport, Trainer, Votes};

/// Steps after which a product is checked on the data of the run.
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
    saved_step: u64,
    last_save: Instant,
    n_rollbacks: u64,
    /// Error on this rank alone since the last vote: all leave together, with a checkpoint.
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
        let warn = &mut |message: &str| observer.warned(message);
        let allowed = AllowedDifferences { lengthen: job.lengthen, forked_step: job.forked_step };
        let (plan, lock) = workdir::agree(job.workdir, job.plan, allowed, &comm, warn)?;
        let topology = comm.topology();
        let beats = heartbeat::folder_of(job.workdir);
        let heartbeat = HeartbeatWriter::start(&beats, topology.rank, comm.recorder())?;
        let failed = |error: &TrainError| heartbeat.give_up(error);
        if topology.world_size > 1 {
            comm.set_watch(Arc::new(RankWatch::new(&beats, &comm).inspect_err(failed)?));
        }
        let mut trainer = plan.trainer(comm, &job.device).inspect_err(failed)?;
        let folder = job.workdir.join("checkpoints");
        for warning in warnings(&plan)
            .iter()
            .chain(&job.fault.iter().filter_map(|fault| fault.misses(&plan)).collect::<Vec<_>>())
        {
            warn_on_first(topology.rank, warning, observer);
        }
        let warn = &mut |message: &str| warn_on_first(topology.rank, message, observer);
        let state_device = trainer.state_device().clone();
        let state = &mut trainer.state;
        let resumed = checkpoint::resume(&folder, u64::MAX, state, &trainer.comm, &state_device, warn);
        if let (None, Some(initial)) = (resumed.inspect_err(failed)?, job.initial) {
            let has_heads = plan.recipe.init.as_ref().is_some_and(|init| init.heads);
            trainer.start_from(initial, has_heads).map_err(TrainError::from).inspect_err(failed)?;
        }
        for frozen in job.frozen {
            trainer
                .load_frozen(frozen.name, &frozen.weights)
                .map_err(TrainError::from)
                .inspect_err(failed)?;
        }
        let saver = Saver::new(&folder, topology, plan.recipe.run.keep_checkpoints);
        let first = trainer.state.step;
        if topology.rank == 0 && first > 0 {
            // A run that was killed between a checkpoint and its pruning left one too many.
            checkpoint::prune(&folder, first, plan.recipe.run.keep_checkpoints);
        }
        observer.started(first, plan.total_steps);
        let journal =
            Journal::open(job.workdir, &plan, &job.dataset, topology.rank, first).inspect_err(failed)?;
        let stream = Stream::open(job, &plan, &trainer).inspect_err(failed)?;
        Ok(Self {
            schedules: plan.schedules(),
            plan,
            job,
            trainer,
            saver,
            heartbeat,
            journal,
            stream,
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
            self.leave()?;
            return Ok(Outcome::Finished);
        }
        if self.trainer.state.step == 0 && self.plan.recipe.init.is_some() {
            let Self { trainer, plan, heartbeat, .. } = &*self;
            Journal::probe_start(trainer, plan, probes, heartbeat, observer)?;
        }
        let (mut next, mut agreed) = self.first_batch()?;
        loop {
            let batch = match next {
                Next::Batch(batch) if agreed.stop == 0.0 && agreed.failed == 0.0 => batch,
                ended => return self.end_early(ended, agreed, observer),
            };
            let report;
            (report, next) = self.step(batch, probes, observer)?;
            agreed = report.votes;
            if agreed.wrong > 0.0 {
                return self.end_wrong();
            }
            if self.trainer.state.step == self.plan.total_steps {
                // As many as would cause a rollback, or all steps of a run that has fewer.
                let n_steps = self.trainer.state.bad_steps;
                if u64::from(n_steps) >= self.plan.total_steps.min(u64::from(MAX_BAD_STEPS)) {
                    let step = self.trainer.state.step - 1;
                    return self.end_together(TrainError::NotFinite { step, n_steps });
                }
                self.save()?;
                self.finish_saving()?;
                return self.finish();
            }
            let goes_on = agreed.stop == 0.0 && agreed.failed == 0.0;
            if goes_on && self.trainer.state.bad_steps >= MAX_BAD_STEPS {
                self.roll_back(observer)?;
                (next, agreed) = self.first_batch()?;
            }
        }
    }

    /// Waits for the first batch of a stream, and agrees on whether all ranks have theirs.
    fn first_batch(&mut self) -> Result<(Next, Votes), TrainError> {
        self.heartbeat.enter(self.trainer.state.step, "data");
        let next = self.stream.next(self.job.stop);
        let votes = self.votes(&next);
        let said = vec![votes.stop, votes.failed];
        let said = self.trainer.comm.all_reduce("first batch", said, Reduction::Sum)?;
        Ok((next, Votes { stop: said[0], failed: said[1], ..Votes::default() }))
    }

    /// Takes one step with everything around it, and waits for the next batch.
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
        products::begin_step();
        if step > 0 && step.is_multiple_of(STEPS_BETWEEN_CHECKS) {
            products::check_one(step / STEPS_BETWEEN_CHECKS);
        }
        let heartbeat = &self.heartbeat;
        let fault = &self.job.fault;
        let enter = |phase: &'static str| {
            heartbeat.enter(step, phase);
            if let Some(fault) = fault {
                fault.trigger(rank, step, phase);
            }
        };
        let computed =
            self.stream.gradients(batch, &self.trainer, &scheduled_values, &mut |phase| enter(phase));
        let (mut gradients, upload_wait_ms) = computed?;
        // By batch, because a rollback skips the batches that the fault struck.
        let number = step + self.trainer.state.skipped_batches;
        if fault.as_ref().is_some_and(|fault| fault.makes_nan(rank, number)) {
            gradients.fill_nan();
        }
        // The next batch is fetched before ranks agree on this step, so that they agree on it as
        // well.
        enter("data");
        let waiting = Instant::now();
        let next =
            if step + 1 == self.plan.total_steps { Next::Stopped } else { self.stream.next(self.job.stop) };
        let data_wait_ms = waiting.elapsed().as_secs_f64() * 1e3 + upload_wait_ms;
        enter("update");
        let votes = self.votes(&next);
        let report = self.trainer.update(gradients, votes, &scheduled_values)?;
        self.saver.agreed(report.votes.saved, report.votes.save_failed)?;
        if report.votes.wrong > 0.0 {
            return Ok((report, next));
        }
        let time = StepTime { seconds: start.elapsed().as_secs_f64(), data_wait_ms };
        let Self { journal, trainer, plan, heartbeat, .. } = self;
        let told = journal
            .tell_of_kernels(step, rank, observer)
            .and_then(|()| journal.tell(trainer, plan, &report, time, observer));
        let logged =
            journal.log(trainer, plan, &report, &scheduled_values, time, probes, heartbeat, observer);
        let there = workdir::check(self.job.workdir, self.lock.as_ref());
        if let Err(error) = there.and(logged).and(told) {
            match error {
                // Ranks that have lost one another cannot vote.
                TrainError::Ranks(_) => return Err(error),
                error => self.failure = Some(error),
            }
        }
        let done = self.trainer.state.step;
        let every_steps = self.plan.recipe.run.checkpoint_every_steps;
        if (done.is_multiple_of(every_steps) || report.votes.due > 0.0) && report.finite {
            self.heartbeat.enter(step, "checkpoint");
            if let Some(fault) = &self.job.fault {
                fault.trigger(rank, step, "checkpoint");
            }
            self.save()?;
        }
        Ok((report, next))
    }

    fn votes(&mut self, next: &Next) -> Votes {
        let (saved, save_failed) = self.saver.vote();
        let flag = |set: bool| f64::from(u8::from(set));
        Votes {
            stop: flag(self.job.stop.load(Ordering::Relaxed)),
            failed: flag(matches!(next, Next::Failed(_)) || self.failure.is_some()),
            saved,
            save_failed,
            due: flag(self.is_due()),
            wrong: flag(products::wrong().is_some()),
        }
    }

    /// Returns whether a checkpoint is due by the clock of rank 0.
    fn is_due(&self) -> bool {
        let minutes = self.plan.recipe.run.checkpoint_every_minutes;
        let is_first = self.trainer.topology().rank == 0;
        is_first && minutes > 0.0 && self.last_save.elapsed().as_secs_f64() >= 60.0 * minutes
    }

    /// Starts a checkpoint, if there is something new, after waiting for an earlier one.
    fn save(&mut self) -> Result<(), TrainError> {
        if self.saved_step == self.trainer.state.step {
            return Ok(());
        }
        self.finish_saving()?;
        // A checkpoint would create the folder anew, where nobody expects it.
        let there = workdir::check(self.job.workdir, self.lock.as_ref());
        // All ranks write, or none does.
        let gone = vec![f64::from(u8::from(there.is_err()))];
        let n_gone = self.trainer.comm.all_reduce("work directory", gone, Reduction::Sum)?[0];
        there?;
        if n_gone > 0.0 {
            return Err(TrainError::WorkdirMissing { workdir: self.job.workdir.to_path_buf() });
        }
        self.saver.start(&self.trainer.state, &self.plan);
        self.saved_step = self.trainer.state.step;
        self.last_save = Instant::now();
        Ok(())
    }

    /// Waits until the checkpoint in flight is complete.
    fn finish_saving(&mut self) -> Result<(), TrainError> {
        if self.saver.is_busy() {
            self.heartbeat.enter(self.trainer.state.step, "checkpoint");
            let (saved, failed) = self.saver.wait_for_own();
            let said = self.trainer.comm.all_reduce("checkpoint", vec![saved, failed], Reduction::Sum)?;
            self.saver.agreed(said[0], said[1])?;
        }
        Ok(())
    }

    /// Goes back to the newest checkpoint and skips the batches since then.
    fn roll_back(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        self.finish_saving()?;
        let state_device = self.trainer.state_device().clone();
        let state = &mut self.trainer.state;
        let step = state.step - 1;
        let next_batch = state.step + state.skipped_batches;
        let too_often = TrainError::NotFinite { step, n_steps: MAX_BAD_STEPS };
        if self.n_rollbacks == self.plan.recipe.run.max_rollbacks {
            return self.end_together(too_often);
        }
        let rank = self.trainer.comm.topology().rank;
        let folder = self.job.workdir.join("checkpoints");
        let warn = &mut |message: &str| warn_on_first(rank, message, observer);
        let newest = state.step;
        let found = checkpoint::resume(&folder, newest, state, &self.trainer.comm, &state_device, warn)?;
        let Some(back_to) = found else { return self.end_together(too_often) };
        self.n_rollbacks += 1;
        state.skipped_batches = next_batch - back_to;
        state.bad_steps = 0;
        self.saved_step = back_to;
        let reason = format!(
            "step {step}: {MAX_BAD_STEPS} steps in a row were not finite; back to step {back_to}, past the batches up to {}",
            next_batch - 1
        );
        if rank == 0 {
            observer.happened(&reason);
        }
        self.journal.go_back(self.job.workdir, [step, back_to], reason)?;
        self.stream = Stream::open(self.job, &self.plan, &self.trainer)?;
        Ok(())
    }

    /// Ends the run because some rank was asked to stop or has no batch, after all ranks have
    /// saved.
    fn end_early(
        &mut self,
        next: Next,
        agreed: Votes,
        observer: &mut dyn Observer,
    ) -> Result<Outcome, TrainError> {
        let saved = self.save().and_then(|()| self.finish_saving());
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

    /// Ends the run after all steps: ranks exchange failures since the last vote, and then leave.
    fn finish(&mut self) -> Result<Outcome, TrainError> {
        let failed = f64::from(u8::from(self.failure.is_some()));
        let n_failed = self.trainer.comm.all_reduce("the last word", vec![failed], Reduction::Sum)?[0];
        self.leave()?;
        match self.failure.take() {
            Some(error) => Err(error),
            None if n_failed > 0.0 => Err(TrainError::PeersFailed { n_ranks: n_failed as usize }),
            None => Ok(Outcome::Finished),
        }
    }

    /// Ends the run because a product has become wrong on some rank, without saving what came of
    /// it.
    fn end_wrong<T>(&mut self) -> Result<T, TrainError> {
        let found = products::wrong();
        // Sizes are checked when the process first uses them, and then in some of the checks.
        let last_right = match &found {
            Some(wrong) => (wrong.last_right * STEPS_BETWEEN_CHECKS).max(self.first),
            None => self.first,
        };
        let folder = self.job.workdir.join("checkpoints");
        let good = checkpoint::steps(&folder)
            .into_iter()
            .map(|(step, _)| step)
            .filter(|step| *step <= last_right)
            .max();
        let what = found.map_or_else(|| "another rank found a wrong product".into(), |wrong| wrong.what);
        let step = self.trainer.state.step - 1;
        self.end_together(TrainError::WrongProduct { step, last_right, good, what })
    }

    /// Ends the run with an error that all ranks have in common.
    fn end_together<T>(&mut self, error: TrainError) -> Result<T, TrainError> {
        // Launchers are easier on ranks that have taken leave of one another.
        let _ = self.leave();
        Err(error)
    }
}

fn warn_on_first(rank: usize, message: &str, observer: &mut dyn Observer) {
    if rank == 0 {
        observer.happened(message);
    }
}
