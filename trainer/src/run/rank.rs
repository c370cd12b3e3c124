//! The loop of one rank. What ranks must do alike is decided by what all of them have said: in the step's
//! votes, or in a collective of its own.

mod ending;

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use burn::tensor::Tensor;

use super::stream::{Arrival, Next, Stream};
use super::{Job, Observer, Outcome, Progress, teacher_of, trainer_of};
use crate::checkpoint::{self, Saver};
use crate::error::TrainError;
use crate::peers::Peers;
use crate::plan::Plan;
use crate::probe::Probe;
use crate::row::{row_of, warn_of_collapse};
use crate::schedule::{Knobs, Schedules};
use crate::shard::comm::Comm;
use crate::shard::engine::Reduction;
use crate::step::{StepReport, Trainer, Votes};
use crate::straggler::Stragglers;
use crate::telemetry::Telemetry;
use crate::watch::{Pulse, RankWatch};
use crate::workdir;

/// Steps in a row that may be skipped before the run goes back to its last checkpoint, or stops.
const MAX_BAD_STEPS: u32 = 3;

/// A run that is under way.
pub(super) struct Run<'a> {
    job: &'a Job<'a>,
    plan: Plan,
    schedules: Schedules,
    trainer: Trainer,
    saver: Saver,
    pulse: Pulse,
    telemetry: Option<Telemetry>,
    stragglers: Stragglers,
    stream: Stream,
    saved_step: u64,
    n_rollbacks: u64,
    /// What has failed on this rank alone since the last vote: all leave together, with a checkpoint.
    failure: Option<TrainError>,
    /// Rank 0's claim on the work directory.
    _lock: Option<File>,
}

impl<'a> Run<'a> {
    /// Claims the work directory and goes to where the run stands. All ranks call it.
    pub(super) fn open(
        job: &'a Job<'a>,
        comm: Comm,
        observer: &mut dyn Observer,
    ) -> Result<Self, TrainError> {
        let warn = &mut |message: &str| observer.warned(message);
        let (plan, lock) = workdir::agree(job.workdir, job.plan, &comm, warn)?;
        let place = comm.place();
        let beats = job.workdir.join("heartbeats");
        let pulse = Pulse::start(&beats, place.rank, comm.recorder())?;
        if place.world_size > 1 {
            comm.set_watch(Arc::new(RankWatch::new(&beats, &comm)?));
        }
        let mut trainer = trainer_of(&plan, comm, &job.device);
        let folder = job.workdir.join("checkpoints");
        let warn = &mut |message: &str| warn_on_first(place.rank, message, observer);
        let state_device = trainer.state_device().clone();
        checkpoint::resume(&folder, u64::MAX, &mut trainer.state, &trainer.comm, &state_device, warn)?;
        let saver = Saver::new(&folder, place, plan.recipe.run.keep_checkpoints);
        let first = trainer.state.step;
        observer.started(first, plan.total_steps);
        let telemetry = (place.rank == 0).then(|| Telemetry::open(job.workdir, first)).transpose()?;
        let stream = Stream::open(job, &plan, &trainer)?;
        Ok(Self {
            schedules: plan.schedules(),
            plan,
            job,
            trainer,
            saver,
            pulse,
            telemetry,
            stragglers: Stragglers::default(),
            stream,
            saved_step: first,
            n_rollbacks: 0,
            failure: None,
            _lock: lock,
        })
    }

    /// Takes the steps that are left.
    pub(super) fn train(
        mut self,
        probes: &mut [Box<dyn Probe>],
        observer: &mut dyn Observer,
    ) -> Result<Outcome, TrainError> {
        let result = self.take_steps(probes, observer);
        if let Err(error) = &result {
            self.pulse.give_up(error);
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
        let (mut next, mut agreed) = self.first_batch()?;
        loop {
            let batch = match next {
                Next::Batch(batch) if agreed.stop == 0.0 && agreed.failed == 0.0 => batch,
                ended => return self.end_early(ended, agreed, observer),
            };
            let report;
            (report, next) = self.step(batch, probes, observer)?;
            agreed = report.votes;
            if self.trainer.state.step == self.plan.total_steps {
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

    /// The first batch of a stream, and whether all ranks have theirs.
    fn first_batch(&mut self) -> Result<(Next, Votes), TrainError> {
        self.pulse.enter(self.trainer.state.step, "data");
        let next = self.stream.next(self.job.stop);
        let votes = self.votes(&next);
        let said = vec![votes.stop, votes.failed];
        let said = self.trainer.comm.all_reduce("first batch", said, Reduction::Sum)?;
        Ok((next, Votes { stop: said[0], failed: said[1], ..Votes::default() }))
    }

    /// One step with everything around it, and the next batch.
    fn step(
        &mut self,
        batch: Arrival,
        probes: &mut [Box<dyn Probe>],
        observer: &mut dyn Observer,
    ) -> Result<(StepReport, Next), TrainError> {
        let start = Instant::now();
        let step = self.trainer.state.step;
        let knobs = self.schedules.at(step);
        let rank = self.trainer.place().rank;
        let (pulse, fault) = (&self.pulse, &self.job.fault);
        let enter = |phase: &'static str| {
            pulse.enter(step, phase);
            if let Some(fault) = fault {
                fault.strike(rank, step, phase);
            }
        };
        let computed = self.stream.gradients(batch, &self.trainer, &knobs, &mut |phase| enter(phase));
        let (mut gradients, upload_wait_ms) = computed?;
        // By batch: a rollback passes over what it struck.
        let number = step + self.trainer.state.skipped_batches;
        if fault.as_ref().is_some_and(|fault| fault.poisons(rank, number)) {
            gradients.poison();
        }
        // The next batch is asked for before ranks agree on this step, so that they agree on it as well.
        enter("data");
        let waiting = Instant::now();
        let next = match step + 1 == self.plan.total_steps {
            true => Next::Stopped,
            false => self.stream.next(self.job.stop),
        };
        let data_wait_ms = waiting.elapsed().as_secs_f64() * 1e3 + upload_wait_ms;
        enter("update");
        let votes = self.votes(&next);
        let report = self.trainer.update(gradients, votes, &knobs)?;
        self.saver.agreed(report.votes.saved, report.votes.save_failed)?;
        let seconds = start.elapsed().as_secs_f64();
        self.tell(&report, seconds, data_wait_ms, observer);
        if let Err(error) = self.log(&report, &knobs, seconds, data_wait_ms, probes, observer) {
            match error {
                // Ranks that have lost one another cannot vote.
                TrainError::Ranks(_) => return Err(error),
                error => self.failure = Some(error),
            }
        }
        let done = self.trainer.state.step;
        if done.is_multiple_of(self.plan.recipe.run.checkpoint_every_steps) && report.finite {
            self.pulse.enter(step, "checkpoint");
            if let Some(fault) = &self.job.fault {
                fault.strike(rank, step, "checkpoint");
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
        }
    }

    fn tell(&mut self, report: &StepReport, seconds: f64, data_wait_ms: f64, observer: &mut dyn Observer) {
        let done = self.trainer.state.step;
        observer.stepped(Progress {
            step: done,
            total_steps: self.plan.total_steps,
            loss: report.loss,
            images_per_s: self.plan.recipe.optim.batch_size as f64 / seconds,
            data_wait_ms,
        });
        if !report.finite {
            let message = format!("step {}: loss or gradient is not finite; the step is skipped", done - 1);
            if self.trainer.place().rank == 0 {
                observer.happened(&message);
            }
        }
    }

    /// Writes the row of the step, where one is due, with what ranks have to be asked for.
    fn log(
        &mut self,
        report: &StepReport,
        knobs: &Knobs,
        seconds: f64,
        data_wait_ms: f64,
        probes: &mut [Box<dyn Probe>],
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let done = self.trainer.state.step;
        let settings = &self.plan.recipe.run;
        let last = done == self.plan.total_steps;
        let every = settings.probe_every_steps;
        let probing = !probes.is_empty() && (last || (every > 0 && done.is_multiple_of(every)));
        if !(done.is_multiple_of(settings.log_every_steps) || last || probing) {
            return Ok(());
        }
        let step = done - 1;
        let comm = &self.trainer.comm;
        let peers = Peers::new(comm, report.embeddings.len());
        let [_, width] = report.embeddings[0].dims();
        let d = self.plan.recipe.model.width();
        let images = peers.gather("embeddings", &report.embeddings)?;
        let [b, _] = images.dims();
        let embeddings: Tensor<2> = images.reshape([b * width / d, d]);
        let busy_ms = seconds * 1e3 - report.phases.wait_ms;
        let slow = self.stragglers.look(comm, step, busy_ms, data_wait_ms)?;
        let timing = [
            ("time/data_wait_ms", data_wait_ms),
            ("time/step_ms", seconds * 1e3),
            ("rate/images_per_s", self.plan.recipe.optim.batch_size as f64 / seconds),
        ];
        let mut row = row_of(&self.plan, step, knobs, report, embeddings, &timing);
        row.extend(slow.row);
        if self.trainer.place().rank == 0 {
            slow.warnings.iter().for_each(|message| observer.warned(message));
            let method = self.trainer.state.method.as_ref();
            warn_of_collapse(&self.plan, step, report, &row, method, &mut |m| observer.warned(m));
        }
        if probing {
            self.pulse.enter(step, "probe");
            row.extend(probe_all(&self.trainer, &self.plan, done, probes, observer)?);
        }
        match &mut self.telemetry {
            Some(telemetry) => telemetry.write(step, &row),
            None => Ok(()),
        }
    }

    /// Starts to save, if there is something new; an earlier one is waited for.
    fn save(&mut self) -> Result<(), TrainError> {
        if self.saved_step == self.trainer.state.step {
            return Ok(());
        }
        self.finish_saving()?;
        self.saver.start(&mut self.trainer.state, &self.plan);
        self.saved_step = self.trainer.state.step;
        Ok(())
    }

    /// Waits until the checkpoint in flight is whole.
    fn finish_saving(&mut self) -> Result<(), TrainError> {
        if self.saver.is_busy() {
            self.pulse.enter(self.trainer.state.step, "checkpoint");
            let (saved, failed) = self.saver.wait_for_own();
            let said = self.trainer.comm.all_reduce("checkpoint", vec![saved, failed], Reduction::Sum)?;
            self.saver.agreed(said[0], said[1])?;
        }
        Ok(())
    }

    /// Goes back to the newest checkpoint and passes over the batches since then.
    fn roll_back(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        self.finish_saving()?;
        let state_device = self.trainer.state_device().clone();
        let state = &mut self.trainer.state;
        let (step, next_batch) = (state.step - 1, state.step + state.skipped_batches);
        let too_often = TrainError::NotFinite { step, n_steps: MAX_BAD_STEPS };
        if self.n_rollbacks == self.plan.recipe.run.max_rollbacks {
            return self.end_together(too_often);
        }
        let rank = self.trainer.comm.place().rank;
        let folder = self.job.workdir.join("checkpoints");
        let warn = &mut |message: &str| warn_on_first(rank, message, observer);
        let newest = state.step;
        let found = checkpoint::resume(&folder, newest, state, &self.trainer.comm, &state_device, warn)?;
        let Some(back_to) = found else { return self.end_together(too_often) };
        self.n_rollbacks += 1;
        state.skipped_batches = next_batch - back_to;
        state.bad_steps = 0;
        self.saved_step = back_to;
        if rank == 0 {
            observer.happened(&format!(
                "step {step}: {MAX_BAD_STEPS} steps in a row were not finite; back to step {back_to}, past the \
                 batches up to {}",
                next_batch - 1
            ));
        }
        if self.telemetry.is_some() {
            self.telemetry = Some(Telemetry::open(self.job.workdir, back_to)?);
        }
        self.stream = Stream::open(self.job, &self.plan, &self.trainer)?;
        Ok(())
    }
}

fn warn_on_first(rank: usize, message: &str, observer: &mut dyn Observer) {
    if rank == 0 {
        observer.happened(message);
    }
}

fn probe_all(
    trainer: &Trainer,
    plan: &Plan,
    step: u64,
    probes: &mut [Box<dyn Probe>],
    observer: &mut dyn Observer,
) -> Result<Vec<(String, f64)>, TrainError> {
    let mut row = Vec::new();
    let Some(network) = teacher_of(trainer, plan)? else { return Ok(row) };
    for probe in probes {
        let name = probe.name().to_string();
        let numbers =
            probe.run(&network).map_err(|reason| TrainError::Probe { name: name.clone(), reason })?;
        observer.probed(step, &name, &numbers);
        row.extend(numbers.into_iter().map(|(key, value)| (format!("{name}/{key}"), value)));
    }
    Ok(row)
}
