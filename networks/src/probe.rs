//! Interface of evaluations, through which a run calls them without depending on them.

use crate::inference::Network;
use crate::tensor::NamedTensor;

/// Number by which a run tells which of its weights are the best, and whether it ends early.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WatchedScore {
    /// Name of the number, among those that the probe returns.
    pub name: String,
    /// Whether larger numbers are better.
    pub is_higher_better: bool,
    /// Images on which it is measured, in words: numbers on other images are not compared. Empty on
    /// ranks other than the first, which measure nothing.
    pub images: String,
    /// Hash that identifies these images, whatever their folder is called; `None` if it is not
    /// known, and on ranks other than the first.
    pub fingerprint: Option<String>,
}

/// An evaluation of frozen features that a run calls at intervals of steps.
pub trait Probe {
    /// Returns the name, which prefixes the scores in the metrics.
    fn name(&self) -> &str;

    /// Returns the interval of steps at which the probe runs in a run of `total_steps` steps,
    /// besides its start and its end; 0 for none. `every_steps` is what the recipe says. It is the
    /// same on all ranks.
    fn interval(&self, every_steps: u64, total_steps: u64) -> u64 {
        let _ = total_steps;
        every_steps
    }

    /// Returns the number that the run watches, if this probe returns it; `None` on all ranks or on
    /// none. One probe of a run has it at most.
    fn watched(&self) -> Option<WatchedScore> {
        None
    }

    /// Returns whether the probe needs the heads of the network; the same on all ranks.
    fn needs_heads(&self) -> bool {
        false
    }

    /// Evaluates a network of the run's form before the run, so that the time of an evaluation is
    /// known; records nothing.
    ///
    /// # Errors
    /// Description of the failure.
    fn rehearse(&mut self, network: &Network) -> Result<(), String> {
        let _ = network;
        Ok(())
    }

    /// Evaluates the network after `step` steps; returns the scores by name. `heads` are the
    /// parameters of its heads if a probe of the run needs them, else empty.
    ///
    /// # Errors
    /// Description of the failure.
    fn run(
        &mut self,
        network: &Network,
        heads: &[NamedTensor],
        step: u64,
    ) -> Result<Vec<(String, f64)>, String>;
}
