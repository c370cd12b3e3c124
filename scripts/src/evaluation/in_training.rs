//! The probe that a run calls every so many steps.

use std::path::PathBuf;

use eval::{Protocol, Silent, Split, Transform};
use networks::Network;
use networks::probe::Probe;
use report::About;
use trainer::Plan;

use super::network::{Described, about};
use super::record;
use super::scores::rows;
use crate::console::say;

/// Protocols on sets that were given before the run.
pub(crate) struct InTraining {
    /// What it looks at.
    pub(crate) split: Split,
    /// What it computes.
    pub(crate) protocols: Vec<Protocol>,
    /// The run's folder, whose evaluations say what the numbers are of.
    pub(crate) workdir: PathBuf,
    /// The run.
    pub(crate) plan: Plan,
}

impl InTraining {
    /// What the numbers are of.
    fn about(&self, network: &Network, step: u64) -> Result<About, String> {
        let described = Described {
            network,
            which: self.plan.evaluated().map_err(|error| error.to_string())?,
            step: Some(step),
            recipe: Some(self.plan.recipe.name.clone()),
            transform: self.transform(),
        };
        Ok(about(&described, None))
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
        let scores =
            self.split.score(network, &self.protocols, None, &Silent).map_err(|error| error.to_string())?;
        let rows = rows(&scores, &self.split, &self.about(network, step)?);
        // TensorBoard has them from the run itself.
        if let Err(error) = record::add(&self.workdir, step, &rows, &[]) {
            say(format!("warning: the scores of step {step} are not among the evaluations: {error:#}"));
        }
        Ok(scores.by_name().collect())
    }
}
