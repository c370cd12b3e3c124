//! The loop of a run: batches in, steps, metrics, checkpoints, probes out.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use burn::tensor::Device;
use pipeline::{Cursor, Dataset, Share, file};

use crate::backbone::Readout;
use crate::checkpoint::{self, Checkpoint};
use crate::data::batches;
use crate::error::TrainError;
use crate::health;
use crate::method::MATCH_LOSS;
use crate::network::Network;
use crate::plan::Plan;
use crate::probe::Probe;
use crate::schedule::Knobs;
use crate::shard::engine::Solo;
use crate::shard::store::to_host;
use crate::step::{StepReport, Trainer};
use crate::telemetry::Telemetry;

/// Steps in a row that may be skipped before the run stops.
const MAX_BAD_STEPS: u32 = 3;

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are taken.
    Finished,
    /// It was asked to stop, and a checkpoint is written.
    Stopped,
}

/// What a step looked like, for a progress bar.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Steps taken.
    pub step: u64,
    /// Steps of the run.
    pub total_steps: u64,
    /// Loss of the last step.
    pub loss: f64,
    /// Images a second, over the last step.
    pub images_per_s: f64,
    /// Time that the last step waited for its batch.
    pub data_wait_ms: f64,
}

/// What a run tells while it runs.
pub trait Observer {
    /// Called once, with the step that the run starts or continues at.
    fn started(&mut self, step: u64, total_steps: u64);
    /// Called after every step.
    fn stepped(&mut self, progress: Progress);
    /// Called with something that people should know.
    fn warned(&mut self, message: &str);
    /// Called after a probe.
    fn probed(&mut self, step: u64, name: &str, numbers: &[(String, f64)]);
}

/// Trains `plan` in `workdir` until it is finished or `stop` is set, from the newest checkpoint on
/// if there is one.
///
/// # Errors
/// Whatever stops a run; what was checkpointed stays.
pub fn run(
    plan: &Plan,
    dataset: Arc<Dataset>,
    workdir: &Path,
    stop: &AtomicBool,
    probes: &mut [Box<dyn Probe>],
    observer: &mut dyn Observer,
) -> Result<Outcome, TrainError> {
    let plan = &claim(workdir, plan, observer)?;
    let mut trainer = trainer_of(plan);
    let folder = workdir.join("checkpoints");
    if let Some(found) = Checkpoint::newest(&folder)? {
        found.restore(&mut trainer.state, &Device::flex())?;
    }
    let first = trainer.state.step;
    observer.started(first, plan.total_steps);
    let mut telemetry = Telemetry::open(workdir, first)?;
    if first >= plan.total_steps {
        return Ok(Outcome::Finished);
    }
    let share = Share::solo(plan.recipe.optim.batch_size)?;
    let ledger = workdir.join("quarantine.jsonl");
    let mut pool = batches(dataset, plan, share, Cursor(first), &ledger)?;
    let schedules = plan.schedules();
    let settings = &plan.recipe.run;
    let mut saved_step = first;
    for step in first..plan.total_steps {
        let start = Instant::now();
        let batch = match pool.next_batch_unless(stop) {
            Some(Ok(batch)) => batch,
            // Data may take long to come, and may not come at all. What was learned is not lost.
            ended => {
                let saved = match trainer.state.step > saved_step {
                    true => checkpoint::save(&folder, &mut trainer.state, plan, settings.keep_checkpoints)
                        .map(drop),
                    false => Ok(()),
                };
                if let Err(error) = &saved {
                    observer.warned(&error.to_string());
                }
                return match ended {
                    Some(Err(error)) => Err(error.into()),
                    _ if stop.load(Ordering::Relaxed) => saved.map(|()| Outcome::Stopped),
                    _ => Err(TrainError::DataEnded),
                };
            }
        };
        let data_wait_ms = start.elapsed().as_secs_f64() * 1e3;
        let knobs = schedules.at(step);
        let report = trainer.step(&batch, &knobs);
        pool.recycle(batch);
        let seconds = start.elapsed().as_secs_f64();
        let images_per_s = share.batch_size as f64 / seconds;
        let done = step + 1;
        observer.stepped(Progress {
            step: done,
            total_steps: plan.total_steps,
            loss: report.loss,
            images_per_s,
            data_wait_ms,
        });
        if !report.finite {
            observer.warned(&format!("step {step}: loss or gradient is not finite; the step is skipped"));
            if trainer.state.bad_steps >= MAX_BAD_STEPS {
                return Err(TrainError::NotFinite { step, n_steps: MAX_BAD_STEPS });
            }
        }
        let last = done == plan.total_steps;
        let every = settings.probe_every_steps;
        let probing = !probes.is_empty() && (last || (every > 0 && done.is_multiple_of(every)));
        if done.is_multiple_of(settings.log_every_steps) || last || probing {
            let timing = [
                ("time/data_wait_ms", data_wait_ms),
                ("time/step_ms", seconds * 1e3),
                ("rate/images_per_s", images_per_s),
            ];
            let mut row = row_of(plan, step, &knobs, &report, &timing);
            warn_of_collapse(plan, step, &report, &row, &trainer, observer);
            if probing {
                row.extend(probe_all(&trainer, plan, done, probes, observer)?);
            }
            telemetry.write(step, &row)?;
        }
        let stopping = stop.load(Ordering::Relaxed);
        if done.is_multiple_of(settings.checkpoint_every_steps) || last || stopping {
            checkpoint::save(&folder, &mut trainer.state, plan, settings.keep_checkpoints)?;
            saved_step = done;
        }
        if stopping && !last {
            return Ok(Outcome::Stopped);
        }
    }
    Ok(Outcome::Finished)
}

/// The network under training that `plan` describes, at step zero.
pub fn trainer_of(plan: &Plan) -> Trainer {
    let model = &plan.recipe.model;
    let method = plan.recipe.method.build(plan.multicrop(), model.width());
    Trainer::new(model.units(Readout::Class), method, Box::new(Solo), plan.optimizer(), plan.step_config())
}

/// The teacher's backbone, as evaluation sees it.
///
/// # Errors
/// None in practice.
pub fn teacher_of(trainer: &Trainer, plan: &Plan) -> Result<Network, TrainError> {
    Network::new(&plan.recipe.model, plan.n_workers, |layout| {
        let shard = trainer.state.shards.iter().find(|shard| shard.layout.name == layout.name);
        let shard = shard.ok_or(TrainError::DataEnded)?;
        Ok(to_host(shard.teacher.clone()))
    })
}

/// Makes `workdir`, or checks that it belongs to this plan. Returns the plan to follow: where the
/// recipe leaves the number of workers open, a run goes on with the number that it started with.
fn claim(workdir: &Path, plan: &Plan, observer: &mut dyn Observer) -> Result<Plan, TrainError> {
    fs::create_dir_all(workdir).map_err(|error| TrainError::io("create folder", workdir, error))?;
    let path: PathBuf = workdir.join("plan.toml");
    let unreadable = |reason: String| TrainError::Recipe { recipe: path.display().to_string(), reason };
    let mut plan = plan.clone();
    let before = match fs::read_to_string(&path) {
        Ok(text) => Some(text),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(TrainError::io("read", &path, error)),
    };
    if let Some(text) = &before {
        let there: Plan = toml::from_str(text).map_err(|error| unreadable(error.to_string()))?;
        if let Some((key, there, here)) = there.difference(&plan) {
            return Err(TrainError::OtherRecipe { workdir: workdir.to_path_buf(), key, there, here });
        }
        if plan.recipe.run.workers == 0 {
            plan.n_workers = there.n_workers;
        } else if plan.n_workers != there.n_workers {
            observer.warned(&format!(
                "the run was started with {} workers and goes on with {}: its last bits will differ",
                there.n_workers, plan.n_workers
            ));
        }
    }
    let text = toml::to_string_pretty(&plan).map_err(|error| unreadable(error.to_string()))?;
    if before.as_ref() != Some(&text) {
        file::replace(&path, text.as_bytes()).map_err(|error| TrainError::io("write", &path, error))?;
    }
    Ok(plan)
}

fn row_of(
    plan: &Plan,
    step: u64,
    knobs: &Knobs,
    report: &StepReport,
    timing: &[(&str, f64)],
) -> Vec<(String, f64)> {
    let samples = (step + 1) as f64 * plan.recipe.optim.batch_size as f64;
    let health = health::features(report.embeddings.clone());
    let phases = &report.phases;
    let mut row = vec![
        ("train/loss", report.loss),
        ("train/grad_norm", report.grad_norm),
        ("train/finite", f64::from(u8::from(report.finite))),
        ("train/epoch", samples / plan.n_samples as f64),
        ("train/samples", samples),
        ("knobs/lr", knobs.lr),
        ("knobs/weight_decay", knobs.weight_decay),
        ("knobs/teacher_temp", knobs.teacher_temp),
        ("knobs/teacher_decay", knobs.teacher_decay),
        ("health/feature_std", health.std),
        ("health/effective_rank", health.effective_rank),
        ("time/teacher_ms", phases.teacher_ms),
        ("time/forward_ms", phases.forward_ms),
        ("time/head_ms", phases.head_ms),
        ("time/backward_ms", phases.backward_ms),
        ("time/update_ms", phases.update_ms),
    ];
    row.extend_from_slice(timing);
    row.extend_from_slice(&report.gauges);
    row.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

fn warn_of_collapse(
    plan: &Plan,
    step: u64,
    report: &StepReport,
    row: &[(String, f64)],
    trainer: &Trainer,
    observer: &mut dyn Observer,
) {
    let value = |name: &str| row.iter().find(|(key, _)| key == name).map(|(_, value)| *value);
    let health = health::FeatureHealth {
        std: value("health/feature_std").unwrap_or(1.0),
        effective_rank: value("health/effective_rank").unwrap_or(f64::MAX),
    };
    let grace_steps = plan.warmup_steps.max(plan.total_steps / 10);
    let uninformed = trainer.state.method.uninformed_loss();
    let entropy = value("health/teacher_entropy");
    // What a method adds to its loss has no say in whether the student follows the teacher.
    let loss = value(MATCH_LOSS).unwrap_or(report.loss);
    for warning in health::diagnose(step, grace_steps, loss, uninformed, entropy, health) {
        observer.warned(&format!("step {step}: {warning}"));
    }
}

fn probe_all(
    trainer: &Trainer,
    plan: &Plan,
    step: u64,
    probes: &mut [Box<dyn Probe>],
    observer: &mut dyn Observer,
) -> Result<Vec<(String, f64)>, TrainError> {
    let network = teacher_of(trainer, plan)?;
    let mut row = Vec::new();
    for probe in probes {
        let name = probe.name().to_string();
        let numbers =
            probe.run(&network).map_err(|reason| TrainError::Probe { name: name.clone(), reason })?;
        observer.probed(step, &name, &numbers);
        row.extend(numbers.into_iter().map(|(key, value)| (format!("{name}/{key}"), value)));
    }
    Ok(row)
}
