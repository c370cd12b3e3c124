//! Interface of evaluations, through which a run calls them without depending on them.

use crate::inference::Network;

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

    /// Evaluates a network of the run's form before the run, so that the time of an evaluation is
    /// known; records nothing.
    ///
    /// # Errors
    /// Description of the failure.
    fn rehearse(&mut self, network: &Network) -> Result<(), String> {
        let _ = network;
        Ok(())
    }

    /// Evaluates the network after `step` steps; returns the scores by name.
    ///
    /// # Errors
    /// Description of the failure.
    fn run(&mut self, network: &Network, step: u64) -> Result<Vec<(String, f64)>, String>;
}
