//! Probe that a run calls at regular intervals of steps.

use std::path::PathBuf;

use eval::row::append;
use eval::scores::rows;
use eval::{Protocol, Split};
use networks::probe::Probe;
use networks::{NamedTensor, Network};
use pipeline::Progress;

use crate::evaluated_network::Origin;

/// Protocols on image sets that were opened before the run.
pub struct ScoringProbe {
    /// Images to fit on and to report on.
    pub split: Split,
    /// Protocols to run.
    pub protocols: Vec<Protocol>,
    /// Work directory, whose `evaluations.jsonl` records what each number depends on.
    pub workdir: PathBuf,
    /// Name of the network that is scored.
    pub network_name: &'static str,
    /// Name of the recipe.
    pub recipe: String,
    /// Creates the receiver of the progress of an evaluation after a number of steps, which is
    /// dropped at its end.
    pub new_progress: fn(u64) -> Box<dyn Progress>,
}

impl Probe for ScoringProbe {
    fn name(&self) -> &str {
        "probe"
    }

    fn rehearse(&mut self, network: &Network) -> Result<(), String> {
        let progress = (self.new_progress)(0);
        match self.split.score(network, &self.protocols, None, &*progress) {
            Ok(_) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn run(
        &mut self,
        network: &Network,
        _heads: &[NamedTensor],
        step: u64,
    ) -> Result<Vec<(String, f64)>, String> {
        let progress = (self.new_progress)(step);
        let scores = self.split.score(network, &self.protocols, None, &*progress);
        drop(progress);
        let scores = scores.map_err(|error| error.to_string())?;
        let origin = Origin {
            network_name: self.network_name,
            step: Some(step),
            recipe: Some(&self.recipe),
            transform: self.split.test.transform,
            checkpoint: None,
        };
        let info = origin.describe(network).map_err(|error| error.to_string())?;
        let rows = rows(&scores, &self.split, &info);
        // The run writes the scores to TensorBoard.
        if let Err(error) = append(&self.workdir, &rows) {
            tracing::warn!("could not record the scores of step {step}: {error}");
        }
        Ok(scores.by_name().collect())
    }
}
