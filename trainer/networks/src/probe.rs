//! What evaluation implements, so that a run can call it without knowing it.

use crate::inference::Network;

/// An evaluation of frozen features that a run calls every so many steps.
pub trait Probe {
    /// Its name, which prefixes its numbers in the metrics.
    fn name(&self) -> &str;

    /// Scores the network after `step` steps; gives named numbers.
    ///
    /// # Errors
    /// In words.
    fn run(&mut self, network: &Network, step: u64) -> Result<Vec<(String, f64)>, String>;
}
