//! Fault injection, for drills: a rank that dies, hangs, is slow, computes NaN gradients or finds a
//! wrong matrix product, at a chosen place.
//!
//! Faults are written as `kill:rank=1,step=5,phase=backward`. Phases are those of a step
//! (`targets`, `forward`, `head`, `backward`, `update`), `data` and `checkpoint`.

use std::str::FromStr;
use std::time::Duration;

use kernels::product_kernels;

use crate::recipe::plan::Plan;

/// Kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Kills the process by SIGKILL.
    Kill,
    /// Blocks forever.
    Hang,
    /// Waits for a second, in this and every later step.
    Slow,
    /// Makes the gradients NaN, for `steps` steps.
    Nan,
    /// Has a matrix product found wrong that had been right.
    Product,
}

/// A fault to inject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Kind of the fault.
    pub action: Action,
    /// Rank that has the fault.
    pub rank: usize,
    /// First step with the fault.
    pub step: u64,
    /// Number of steps with the fault, for [`Action::Nan`].
    pub steps: u64,
    /// Phase at whose beginning the fault happens.
    pub phase: String,
}

/// Phases of a step.
const PHASES: [&str; 7] = ["targets", "forward", "head", "backward", "data", "update", "checkpoint"];

/// Time that a slow rank waits: more than the load of a busy machine adds to a step.
const SLOW: Duration = Duration::from_secs(1);

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (action, places) = text.split_once(':').unwrap_or((text, ""));
        let action = match action {
            "kill" => Action::Kill,
            "hang" => Action::Hang,
            "slow" => Action::Slow,
            "nan" => Action::Nan,
            "product" => Action::Product,
            other => return Err(format!("unknown action {other}: use kill, hang, slow, nan or product")),
        };
        let mut fault = Self { action, rank: 0, step: 0, steps: 1, phase: "forward".into() };
        for place in places.split(',').filter(|place| !place.is_empty()) {
            let (key, value) = place.split_once('=').ok_or_else(|| format!("{place} is not KEY=VALUE"))?;
            match key {
                "rank" => fault.rank = parse_number(place, value)? as usize,
                "step" => fault.step = parse_number(place, value)?,
                "steps" => fault.steps = parse_number(place, value)?,
                "phase" if PHASES.contains(&value) => fault.phase = value.to_string(),
                "phase" => return Err(format!("unknown phase {value}: use one of {}", PHASES.join(", "))),
                other => return Err(format!("unknown key {other}: use rank, step, steps or phase")),
            }
        }
        Ok(fault)
    }
}

/// Parses the number `value` of `place`, which the error names.
fn parse_number(place: &str, value: &str) -> Result<u64, String> {
    value.parse::<u64>().map_err(|error| format!("{place}: {error}"))
}

impl Fault {
    /// Triggers the fault, if `rank` enters `phase` of `step` and these match.
    pub fn trigger(&self, rank: usize, step: u64, phase: &str) {
        if rank != self.rank || phase != self.phase || step < self.step {
            return;
        }
        match self.action {
            Action::Slow => std::thread::sleep(SLOW),
            Action::Kill if step == self.step => {
                // It returns only if there is no such process; this one is running.
                let _ =
                    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            }
            Action::Product if step == self.step => product_kernels::inject_wrong_product(),
            Action::Hang if step == self.step => loop {
                std::thread::park();
            },
            _ => {}
        }
    }

    /// Returns a message if the fault cannot happen in a run of `plan`, or may not; `None` if it
    /// will.
    pub fn misses(&self, plan: &Plan) -> Option<String> {
        if self.rank >= plan.world_size {
            return Some(format!(
                "--inject-fault: there is no rank {}: the run has {}, counted from 0",
                self.rank, plan.world_size
            ));
        }
        if self.step >= plan.total_steps {
            return Some(format!(
                "--inject-fault: step {} is beyond the end of the run ({} steps, counted from 0)",
                self.step, plan.total_steps
            ));
        }
        let every_steps = plan.recipe.run.checkpoint_every_steps;
        let saves = (self.step + 1).is_multiple_of(every_steps);
        (self.phase == "checkpoint" && !saves).then(|| {
            format!(
                "--inject-fault: no checkpoint is due after step {}, only every {every_steps} steps: the \
                 fault occurs only if run.checkpoint_every_minutes asks for one then",
                self.step
            )
        })
    }

    /// Returns whether the gradients that `rank` has of global batch `batch` are made NaN.
    pub fn makes_nan(&self, rank: usize, batch: u64) -> bool {
        self.action == Action::Nan
            && rank == self.rank
            && (self.step..self.step + self.steps).contains(&batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_parsed_and_invalid_ones_refused() {
        let fault: Fault = "kill:rank=1,step=5,phase=backward".parse().unwrap();
        assert_eq!((fault.action, fault.rank, fault.step), (Action::Kill, 1, 5));
        assert_eq!(fault.phase, "backward");
        let fault: Fault = "nan:step=3,steps=2".parse().unwrap();
        assert!(fault.makes_nan(0, 4) && !fault.makes_nan(0, 5) && !fault.makes_nan(1, 4));
        for bad in ["kil", "kill:rank", "kill:rank=x", "kill:where=1", "kill:phase=back"] {
            assert!(bad.parse::<Fault>().is_err(), "{bad}");
        }
    }
}
