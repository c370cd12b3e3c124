//! Time and memory of a run, before its first step.

use std::path::Path;

use kernels::device::{DeviceKind, Opened};
use pipeline::Dataset;
use pipeline::words::{counted, thousands};
use session::{Resident, machine, resident};
use trainer::Plan;
use trainer::bench::speed::{Load, machine_speed};
use trainer::checkpoint::steps_of_run;
use trainer::cost::{ModelCost, model_cost};
use trainer::estimate::{Placement, memory};
use trainer::run::Validations;

use crate::console::say;
use crate::progress::{Activity, format_duration, format_time};

/// Bytes of a gigabyte.
const GB: f64 = 1e9;

/// Time and memory of a run.
pub(crate) struct Forecast {
    /// Number of steps of the run.
    total_steps: u64,
    /// Number of steps that are left.
    n_left: u64,
    batch_size: usize,
    /// Seconds of a step, without probes.
    pub(crate) step_s: f64,
    /// Whether steps were measured, not their products and activations alone.
    is_measured: bool,
    memory: MemoryNeed,
}

/// Memory that is needed and that is there: of this machine, or of a GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MemoryNeed {
    /// Bytes that are needed.
    pub(crate) needed_bytes: f64,
    /// Bytes that are there, if that is known.
    pub(crate) available_bytes: Option<f64>,
}

impl MemoryNeed {
    /// Returns the memory of `n_local` processes on this machine that each need as much as this one
    /// by `resident`. What this process holds already is both needed and there.
    pub(crate) fn from_processes(resident: &Resident, n_local: usize) -> Self {
        let n_local = n_local.max(1) as f64;
        let available_bytes = machine::available_bytes().map(|bytes| bytes + n_local * resident.held_bytes);
        Self { needed_bytes: n_local * resident.bytes(), available_bytes }
    }

    /// Formats both as `1.2 of 24.3 GB`.
    pub(crate) fn in_words(&self) -> String {
        let needed = gigabytes(self.needed_bytes);
        match self.available_bytes {
            Some(bytes) => format!("{needed} of {} GB", gigabytes(bytes)),
            None => format!("{needed} GB"),
        }
    }

    /// Returns a warning if more is needed than is there.
    fn warning(&self) -> Option<String> {
        let is_enough = self.available_bytes.is_none_or(|bytes| self.needed_bytes <= bytes);
        if is_enough {
            return None;
        }
        Some(format!(
            "warning: the run needs about {} of memory and may be killed: use a smaller optim.batch_size, or \
             optim.micro_batches=4; `ocelli plan` shows what fits",
            self.in_words()
        ))
    }
}

/// Formats bytes in gigabytes, with two digits below 1 and one after the point above.
fn gigabytes(bytes: f64) -> String {
    let gb = bytes / GB;
    if gb < 0.995 { format!("{gb:.2}") } else { format!("{gb:.1}") }
}

/// Measures this machine, and estimates the seconds of a step of `model` with `placement` on it.
fn estimate_step_s(model: &ModelCost, placement: &Placement, device: &Opened) -> f64 {
    let load = Load::new(
        placement.rank_batch,
        placement.rank_micro_batches,
        placement.workers,
        placement.precision.compute,
    );
    let _activity = Activity::new("measuring the speed of this machine …");
    machine_speed(model, load, &device.device).compute_s(model, placement)
}

/// Returns whether the run of `plan` in `workdir` has ended before its last step, because it did
/// not become better.
fn has_ended_early(plan: &Plan, workdir: &Path) -> bool {
    let Ok(Some(validations)) = Validations::read(workdir) else { return false };
    let validations = Validations { patience: plan.recipe.run.patience, ..validations };
    validations.end_step().is_some()
}

impl Forecast {
    /// Measures this machine, and estimates the run of `plan` in `workdir` on `device` of one of
    /// `n_local` ranks on it, with probes of `n_probed` images, whose step takes `timed_step_s` if
    /// steps were timed. Returns `None` if nothing is left to do, or no estimate is possible: a
    /// forecast that fails must not delay the run.
    pub(crate) fn new(
        plan: &Plan,
        workdir: &Path,
        device: &Opened,
        n_local: usize,
        dataset: &Dataset,
        n_probed: usize,
        timed_step_s: Option<f64>,
    ) -> Option<Self> {
        let newest_step = steps_of_run(workdir).last().map_or(0, |(step, _)| *step);
        let n_left = plan.total_steps.saturating_sub(newest_step);
        if n_left == 0 || has_ended_early(plan, workdir) {
            return None;
        }
        let model = model_cost(plan).ok()?;
        let is_gpu = device.kind != DeviceKind::Cpu;
        let placement = Placement { is_gpu, ..Placement::from_plan(plan) };
        let memory = if device.kind == DeviceKind::Cpu {
            let resident = resident(plan, &model, &placement, n_probed, Some(dataset));
            MemoryNeed::from_processes(&resident, n_local)
        } else {
            MemoryNeed {
                needed_bytes: memory(&model, &placement).needed_bytes(),
                available_bytes: device.free_bytes.map(|bytes| bytes as f64),
            }
        };
        let step_s = match (timed_step_s, plan.minutes) {
            (Some(step_s), _) => step_s,
            // The length was measured by steps when the run began.
            (None, Some(minutes)) => 60.0 * minutes / plan.total_steps.max(1) as f64,
            (None, None) => estimate_step_s(&model, &placement, device),
        };
        Some(Self {
            total_steps: plan.total_steps,
            n_left,
            batch_size: plan.recipe.optim.batch_size,
            step_s,
            is_measured: plan.minutes.is_some(),
            memory,
        })
    }

    /// Prints a note, and a warning if there is not enough memory.
    pub(crate) fn print(&self) {
        say(self.note());
        if let Some(warning) = self.memory.warning() {
            say(warning);
        }
    }

    fn note(&self) -> String {
        let total = counted(self.total_steps, "step");
        let steps = match self.n_left {
            1 if self.total_steps > 1 => format!("1 of {total} is left, of"),
            n if n < self.total_steps => format!("{} of {total} are left, of", thousands(n)),
            _ => format!("{total} of"),
        };
        let images = counted(self.batch_size as u64, "image");
        let duration = format_duration(self.step_s * self.n_left as f64);
        let step = format_time(self.step_s);
        let time = if self.is_measured {
            format!("about {duration}, {step} each")
        } else {
            // Small networks spend most of their time on what lies between products.
            format!("at least {duration}, {step} each for products and activations")
        };
        format!("note: {steps} {images}: {time}; needs about {} of memory", self.memory.in_words())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forecast(n_left: u64, needed_gb: f64, available_gb: Option<f64>) -> Forecast {
        let available_bytes = available_gb.map(|gb| gb * GB);
        let memory = MemoryNeed { needed_bytes: needed_gb * GB, available_bytes };
        Forecast { total_steps: 1250, n_left, batch_size: 64, step_s: 0.28, is_measured: false, memory }
    }

    #[test]
    fn time_and_memory_are_said_in_one_line() {
        let whole = forecast(1250, 1.24, Some(24.31));
        let note = "note: 1,250 steps of 64 images: at least 5 min 50 s, 280 ms each for products and \
                    activations; needs about 1.2 of 24.3 GB of memory";
        assert_eq!(whole.note(), note);
        let measured = Forecast { is_measured: true, ..forecast(1250, 1.24, Some(24.31)) };
        let note = "note: 1,250 steps of 64 images: about 5 min 50 s, 280 ms each; needs about 1.2 of 24.3 GB \
                    of memory";
        assert_eq!(measured.note(), note);
        assert_eq!(whole.memory.warning(), None);
        let resumed = forecast(100, 0.31, None);
        let note = "note: 100 of 1,250 steps are left, of 64 images: at least 28 s, 280 ms each for products \
                    and activations; needs about 0.31 GB of memory";
        assert_eq!(resumed.note(), note);
        assert_eq!(resumed.memory.warning(), None, "nothing is known");
    }

    #[test]
    fn too_little_memory_causes_a_warning() {
        let warning = forecast(1250, 30.1, Some(24.3)).memory.warning().unwrap();
        assert!(warning.contains("needs about 30.1 of 24.3 GB of memory"), "{warning}");
        assert!(warning.contains("optim.batch_size"), "{warning}");
    }
}
