//! Interface of evaluations, through which a run calls them without depending on them.

use crate::inference::Network;

/// An evaluation of frozen features that a run calls at intervals of steps.
pub trait Probe {
    /// Returns the name, which prefixes the scores in the metrics.
    fn name(&self) -> &str;

    /// Evaluates the network after `step` steps; returns the scores by name.
    ///
    /// # Errors
    /// Description of the failure.
    fn run(&mut self, network: &Network, step: u64) -> Result<Vec<(String, f64)>, String>;
}
