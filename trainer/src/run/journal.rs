//! Reports of a run: to the observer after each step, a row of metrics at logged steps, and the
//! numbers of probes.

use std::collections::HashSet;
use std::mem::{Discriminant, discriminant};
use std::path::Path;
use std::time::Instant;

use burn_tensor::Tensor;
use kernels::ops::product_reports;
use kernels::product_kernels::{self, Checked, ProductReport};
use networks::probe::Probe;
use pipeline::Dataset;
use ranks::peers::Peers;

use super::evaluated::{Evaluated, evaluated_network};
use super::health::Concern;
use super::heartbeat::HeartbeatWriter;
use super::job::{Observer, Progress};
use super::metrics::{collapse_alerts, metrics_row};
use super::source_counts::SourceCounts;
use super::straggler::Stragglers;
use super::telemetry::{ProductKernel, Telemetry};
use crate::error::TrainError;
use crate::recipe::plan::Plan;
use crate::schedule::ScheduledValues;
use crate::step::{StepReport, Trainer};

/// Time that a step took.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepTime {
    /// Seconds of the whole step.
    pub(super) seconds: f64,
    /// Milliseconds of the step spent waiting for a batch.
    pub(super) data_wait_ms: f64,
}

/// Numbers of the probes after a step, which are empty except on rank 0.
#[derive(Default)]
struct ProbeNumbers {
    /// Columns of the metrics: the numbers, and the times of the probes.
    row: Vec<(String, f64)>,
    /// The number that the run watches, if a probe has measured it.
    watched: Option<f64>,
}

/// The journal of a rank.
pub(super) struct Journal {
    /// Telemetry of rank 0.
    telemetry: Option<Telemetry>,
    stragglers: Stragglers,
    source_counts: SourceCounts,
    /// Sizes of products whose kernels are recorded, each with its kernel and the result of its
    /// check.
    recorded_products: HashSet<(String, String, Discriminant<Checked>)>,
    /// Seconds that each probe took when it ran last; 0 before.
    probe_seconds: Vec<f64>,
}

impl Journal {
    /// Opens the journal of `rank` in `workdir`, for a run of `plan` that resumes at `next_step`.
    pub(super) fn open(
        workdir: &Path,
        plan: &Plan,
        dataset: &Dataset,
        rank: usize,
        next_step: u64,
    ) -> Result<Self, TrainError> {
        let telemetry = if rank == 0 {
            let mut telemetry = Telemetry::open(workdir, next_step)?;
            telemetry.write_plan(next_step, plan)?;
            Some(telemetry)
        } else {
            None
        };
        Ok(Self {
            telemetry,
            stragglers: Stragglers::default(),
            source_counts: SourceCounts::new(dataset, plan),
            recorded_products: HashSet::new(),
            probe_seconds: Vec::new(),
        })
    }

    /// Rolls back from `step` to `next_step` and records the reason. Rows from `next_step` on are
    /// removed, because the run will write them again.
    pub(super) fn roll_back(
        &mut self,
        workdir: &Path,
        step: u64,
        next_step: u64,
        reason: String,
    ) -> Result<(), TrainError> {
        if self.telemetry.is_some() {
            self.telemetry = Some(Telemetry::roll_back(workdir, next_step)?);
        }
        self.record_warning(step, Concern::NotFinite, &reason)
    }

    /// Reports a step to the observer, before the `probes` that are due after it.
    pub(super) fn report_step(
        &mut self,
        trainer: &Trainer,
        plan: &Plan,
        report: &StepReport,
        time: StepTime,
        probes: &[Box<dyn Probe>],
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let done = trainer.state.step;
        let probes_left_s = probes_left_s(plan, probes, &self.probe_seconds, done - 1);
        observer.stepped(Progress {
            step: done,
            total_steps: plan.total_steps,
            loss: report.loss,
            batch_size: plan.recipe.optim.batch_size,
            step_s: time.seconds,
            data_wait_ms: time.data_wait_ms,
            epoch: done as f64 * plan.recipe.optim.batch_size as f64 / plan.n_samples.max(1) as f64,
            probes_left_s,
        });
        if !report.finite && trainer.topology().rank == 0 {
            let step = done - 1;
            let warning = format!("step {step}: loss or gradient is not finite; the step is skipped");
            observer.warned(&warning);
            self.record_warning(step, Concern::NotFinite, &warning)?;
        }
        Ok(())
    }

    /// Reports new notices about kernels to the observer, and records them as warnings and in a row
    /// of the step.
    pub(super) fn report_kernels(
        &mut self,
        step: u64,
        rank: usize,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let mut notices = product_kernels::notices();
        if notices.is_empty() {
            return Ok(());
        }
        if rank > 0 {
            // Only rank 0 has files.
            notices.iter_mut().for_each(|notice| *notice = format!("rank {rank}: {notice}"));
        }
        for notice in &notices {
            observer.warned(notice);
            self.record_warning(step, Concern::Kernels, notice)?;
        }
        let n_notices = notices.len() as f64;
        match &mut self.telemetry {
            Some(telemetry) => telemetry.write(step, &[("kernels/notices".into(), n_notices)]),
            None => Ok(()),
        }
    }

    /// Records a warning in the files of the run.
    fn record_warning(&mut self, step: u64, concern: Concern, text: &str) -> Result<(), TrainError> {
        match &mut self.telemetry {
            Some(telemetry) => telemetry.warn(step, concern, text),
            None => Ok(()),
        }
    }

    /// Probes the weights that a run starts with. All ranks call it. Their numbers are not in the
    /// metrics, whose rows are of steps.
    pub(super) fn probe_start(
        &mut self,
        trainer: &Trainer,
        plan: &Plan,
        probes: &mut [Box<dyn Probe>],
        heartbeat: &HeartbeatWriter,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        if !probes.is_empty() {
            heartbeat.enter(0, "probe");
            self.run_probes(trainer, plan, 0, probes, observer)?;
        }
        Ok(())
    }

    /// Writes the row of the step that `trainer` has just taken, if one is due, with values that
    /// are gathered from all ranks. Returns the number that the run watches if a probe has measured
    /// it now, on rank 0. All ranks call it.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn log(
        &mut self,
        trainer: &Trainer,
        plan: &Plan,
        report: &StepReport,
        scheduled_values: &ScheduledValues,
        time: StepTime,
        probes: &mut [Box<dyn Probe>],
        heartbeat: &HeartbeatWriter,
        observer: &mut dyn Observer,
    ) -> Result<Option<f64>, TrainError> {
        let done = trainer.state.step;
        let settings = &plan.recipe.run;
        let last = done == plan.total_steps;
        let probing = probes.iter().any(|probe| is_probe_due(plan, probe.as_ref(), done));
        if !(is_row_due(done, settings.log_every_steps) || last || probing) {
            return Ok(None);
        }
        let step = done - 1;
        let busy_ms = time.seconds * 1e3 - report.phases.wait_ms;
        let embeddings = embeddings(trainer, plan, report)?;
        let lateness = self.stragglers.compare(&trainer.comm, step, busy_ms, time.data_wait_ms)?;
        let timing = [
            ("time/data_wait_ms", time.data_wait_ms),
            ("time/step_ms", time.seconds * 1e3),
            ("rate/images_per_s", plan.recipe.optim.batch_size as f64 / time.seconds),
        ];
        let method = trainer.state.method.as_ref();
        let mut row = metrics_row(plan, step, scheduled_values, report, embeddings, &timing, method);
        row.extend(lateness.row);
        row.extend(self.source_counts.after(done));
        if trainer.topology().rank == 0 {
            let mut alerts = collapse_alerts(plan, step, report, &row, method);
            alerts.extend(lateness.alerts);
            for alert in &alerts {
                observer.alerted(alert);
                self.record_warning(step, alert.concern, &alert.text)?;
            }
        }
        let mut watched = None;
        if probing {
            heartbeat.enter(step, "probe");
            let numbers = self.run_probes(trainer, plan, done, probes, observer)?;
            row.extend(numbers.row);
            watched = numbers.watched;
        }
        if let Some(telemetry) = &mut self.telemetry {
            telemetry.write(step, &row)?;
        }
        self.record_products(step, plan)?;
        Ok(watched)
    }

    /// Runs the probes that are due after `done` steps on the evaluated network. All ranks call it.
    fn run_probes(
        &mut self,
        trainer: &Trainer,
        plan: &Plan,
        done: u64,
        probes: &mut [Box<dyn Probe>],
        observer: &mut dyn Observer,
    ) -> Result<ProbeNumbers, TrainError> {
        let mut numbers = ProbeNumbers::default();
        let gathering = Instant::now();
        let needs_heads =
            probes.iter().any(|probe| probe.needs_heads() && is_probe_due(plan, probe.as_ref(), done));
        let Some(evaluated) = evaluated_network(trainer, plan, needs_heads)? else { return Ok(numbers) };
        let Evaluated { network, heads } = &evaluated;
        let gathering_s = gathering.elapsed().as_secs_f64();
        observer.probing(done);
        self.probe_seconds.resize(probes.len(), 0.0);
        for (probe, probe_s) in probes.iter_mut().zip(&mut self.probe_seconds) {
            if !is_probe_due(plan, probe.as_ref(), done) {
                continue;
            }
            let start = Instant::now();
            let name = probe.name().to_string();
            let scores = probe
                .run(network, heads, done)
                .map_err(|reason| TrainError::Probe { name: name.clone(), reason })?;
            *probe_s = gathering_s + start.elapsed().as_secs_f64();
            observer.probed(done, &name, &scores);
            if let Some(watched) = probe.watched() {
                let score = scores.iter().find(|(key, _)| *key == watched.name);
                numbers.watched = score.map(|(_, value)| *value);
            }
            numbers.row.extend(scores.into_iter().map(|(key, value)| (format!("{name}/{key}"), value)));
            numbers.row.push((format!("time/{name}_ms"), 1e3 * *probe_s));
        }
        observer.probes_ended();
        Ok(numbers)
    }

    /// Records the kernels of sizes that were used for the first time since the last row.
    fn record_products(&mut self, step: u64, plan: &Plan) -> Result<(), TrainError> {
        let Some(telemetry) = &mut self.telemetry else { return Ok(()) };
        for ProductReport { size, kernel, checked } in product_reports() {
            if self.recorded_products.insert((size.clone(), kernel.clone(), discriminant(&checked))) {
                let kernels = plan.kernels.clone();
                let checked = checked.to_string();
                telemetry.write_kernel(&ProductKernel { step, kernels, size, kernel, checked })?;
            }
        }
        Ok(())
    }
}

/// Returns whether a row is due after `done` steps: every `every_steps`, and before the first of
/// these after 1, 2, 4, 8 … steps, so that a run of slow steps can be looked at from its first step
/// on.
fn is_row_due(done: u64, every_steps: u64) -> bool {
    done.is_multiple_of(every_steps) || (done < every_steps && done.is_power_of_two())
}

/// Returns the number of rows of metrics of `plan` after its first `done` steps: those that are
/// due, and the last.
pub(super) fn n_rows(plan: &Plan, done: u64) -> u64 {
    let every = plan.recipe.run.log_every_steps;
    let mut n_rows = plan.n_due(every, done);
    let mut early: u64 = 1;
    while early < every.min(plan.total_steps) {
        n_rows += u64::from(early > done);
        early = early.saturating_mul(2);
    }
    n_rows
}

/// Gathers the embeddings of the global batch, `[B·V, D]`.
pub(super) fn embeddings(
    trainer: &Trainer,
    plan: &Plan,
    report: &StepReport,
) -> Result<Tensor<2>, TrainError> {
    let peers = Peers::new(&trainer.comm, report.embeddings.len());
    let [_, width] = report.embeddings[0].dims();
    let d = plan.recipe.model.width();
    let images = peers.gather("embeddings", &report.embeddings)?;
    let [b, _] = images.dims();
    Ok(images.reshape([b * width / d, d]))
}

/// Returns whether `probe` runs after `done` steps.
fn is_probe_due(plan: &Plan, probe: &dyn Probe, done: u64) -> bool {
    let interval = probe.interval(plan.recipe.run.probe_every_steps, plan.total_steps);
    done == 0 || done == plan.total_steps || (interval > 0 && done.is_multiple_of(interval))
}

/// Returns whether one of `probes` measures the number that the run watches after `done` steps.
pub(super) fn is_validation_due(plan: &Plan, probes: &[Box<dyn Probe>], done: u64) -> bool {
    probes.iter().any(|probe| probe.watched().is_some() && is_probe_due(plan, probe.as_ref(), done))
}

/// Estimates the seconds of the probes after more than `done` steps, from the `seconds` that each
/// has taken.
pub fn probes_left_s(plan: &Plan, probes: &[Box<dyn Probe>], seconds: &[f64], done: u64) -> f64 {
    let mut left_s = 0.0;
    for (probe, probe_s) in probes.iter().zip(seconds) {
        let interval = probe.interval(plan.recipe.run.probe_every_steps, plan.total_steps);
        left_s += plan.n_due(interval, done) as f64 * probe_s;
    }
    left_s
}

#[cfg(test)]
mod tests {
    use super::{Probe, is_probe_due, is_row_due, n_rows, probes_left_s};
    use crate::conformance::plans;
    use networks::{NamedTensor, Network};

    /// A probe that runs four times in a run, or as the recipe says.
    struct Quarterly {
        follows_recipe: bool,
    }

    impl Probe for Quarterly {
        fn name(&self) -> &str {
            "quarterly"
        }

        fn interval(&self, every_steps: u64, total_steps: u64) -> u64 {
            if self.follows_recipe { every_steps } else { total_steps / 4 }
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

    /// Each probe is due at its own interval, and counts by its own time.
    #[test]
    fn probes_have_intervals_and_times_of_their_own() {
        let mut plan = plans(&[]).remove(0);
        plan.total_steps = 40;
        plan.recipe.run.probe_every_steps = 0;
        let probes: Vec<Box<dyn Probe>> =
            vec![Box::new(Quarterly { follows_recipe: false }), Box::new(Quarterly { follows_recipe: true })];
        for (index, expected) in [(0, vec![0, 10, 20, 30, 40]), (1, vec![0, 40])] {
            let due: Vec<u64> =
                (0..=40).filter(|done| is_probe_due(&plan, probes[index].as_ref(), *done)).collect();
            assert_eq!(due, expected);
        }
        for (done, left_s) in [(0, 4.0 * 2.0 + 100.0), (10, 3.0 * 2.0 + 100.0), (39, 102.0), (40, 0.0)] {
            assert_eq!(probes_left_s(&plan, &probes, &[2.0, 100.0], done), left_s, "after {done}");
        }
        assert_eq!(probes_left_s(&plan, &probes, &[], 0), 0.0, "none has run");
    }

    /// The number of rows of the rest of a run is that of the steps after which one is due, and of
    /// the last.
    #[test]
    fn rows_of_the_rest_of_a_run_are_counted() {
        let mut plan = plans(&[]).remove(0);
        for every in [1, 3, 8, 10, 50] {
            plan.recipe.run.log_every_steps = every;
            for total_steps in [1, 2, 7, 8, 16, 30] {
                plan.total_steps = total_steps;
                for done in 0..=total_steps {
                    let left = done + 1..=total_steps;
                    let due = left.filter(|step| is_row_due(*step, every) || *step == total_steps);
                    let expected = due.count() as u64;
                    assert_eq!(
                        n_rows(&plan, done),
                        expected,
                        "{total_steps} steps, every {every}, {done} done"
                    );
                }
            }
        }
    }

    #[test]
    fn rows_begin_with_the_first_step() {
        let due: Vec<u64> = (1..=30).filter(|done| is_row_due(*done, 10)).collect();
        assert_eq!(due, [1, 2, 4, 8, 10, 20, 30]);
        assert!((1..9).all(|done| is_row_due(done, 1)));
    }
}
