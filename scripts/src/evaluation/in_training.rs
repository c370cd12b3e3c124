//! Probe that a run calls at regular intervals of steps.
use std::path::PathBuf;

use augment::Transform;
use eval::{Protocol, Split};
use networks::Network;
use networks::probe::Probe;
use pipeline::NoProgress;
use report::NetworkInfo;
use trainer::Plan;

use super::network::{NetworkOrigin, network_info};
use super::record;
use super::scores::rows;
use crate::console::say;

/// Protocols on image sets that were opened before the run.
pub(crate) struct InTraining {
    /// Images to fit on and to report on.
    pub(crate) split: Split,
    /// Protocols to run.
    pub(crate) protocols: Vec<Protocol>,
    /// Work directory, whose `evaluations.jsonl` records what each number depends on.
    pub(crate) workdir: PathBuf,
    /// Plan of the run.
    pub(crate) plan: Plan,
}

impl InTraining {
    /// Returns the metadata of the scores of `network` after `step` steps.
    fn about(&self, network: &Network, step: u64) -> Result<NetworkInfo, String> {
        let origin = NetworkOrigin {
            network,
            which: self.plan.evaluated().map_err(|error| error.to_string())?,
            step: Some(step),
            recipe: Some(self.plan.recipe.name.clone()),
            transform: self.transform(),
        };
        Ok(network_info(&origin, None))
    }

    fn transform(&self) -> Transform {
        self.split.test.transform
    }
}

impl Probe for InTraining {
    fn name(&self) -> &str {
        "probe"
    }

    fn run(&mut self, network: &Network, step: u64) -> Result<Vec<(String, f64)>, String> {
        let scores = self
            .split
            .score(network, &self.protocols, None, &NoProgress)
            .map_err(|error| error.to_string())?;
        let rows = rows(&scores, &self.split, &self.about(network, step)?);
        // The run writes the scores to TensorBoard.
        if let Err(error) = record::add(&self.workdir, step, &rows, &[]) {
            say(format!("warning: could not record the scores of step {step}: {error:#}"));
        }
        Ok(scores.by_name().collect())
    }
}
