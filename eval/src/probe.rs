//! Both probes on one pair of image sets.

use pipeline::Dataset;
use trainer::Network;
use trainer::probe::Probe;

use crate::EvalError;
use crate::features::{FeatureSet, ImageSet};
use crate::knn::{self, KnnScores};
use crate::linear::{self, LinearScore};

/// Labelled images to fit on and to report on.
#[derive(Debug, Clone)]
pub struct Split {
    /// What neighbors and heads are taken from.
    pub train: ImageSet,
    /// What the numbers are about.
    pub test: ImageSet,
}

/// What features are worth.
#[derive(Debug, Clone, PartialEq)]
pub struct ProbeScores {
    /// Nearest neighbors.
    pub knn: KnnScores,
    /// Linear probe; `None` where only neighbors were asked for.
    pub linear: Option<LinearScore>,
}

impl Split {
    /// Loads both sets at `size_px`.
    ///
    /// # Errors
    /// As [`ImageSet::load`].
    pub fn load(train: &Dataset, test: &Dataset, size_px: usize) -> Result<Self, EvalError> {
        Ok(Self {
            train: ImageSet::load(train, size_px, "train")?,
            test: ImageSet::load(test, size_px, "test")?,
        })
    }

    /// Both probes on a network's features.
    pub fn score(&self, network: &Network) -> ProbeScores {
        score(&self.train.features(network), &self.test.features(network), true)
    }

    /// Nearest neighbors on pixels.
    pub fn score_pixels(&self) -> ProbeScores {
        score(&self.train.pixels(), &self.test.pixels(), false)
    }
}

fn score(train: &FeatureSet, test: &FeatureSet, with_linear: bool) -> ProbeScores {
    ProbeScores { knn: knn::score(train, test), linear: with_linear.then(|| linear::score(train, test, 0)) }
}

/// The probe that a run calls every so many steps.
pub struct InTraining(pub Split);

impl Probe for InTraining {
    fn name(&self) -> &str {
        "probe"
    }

    fn run(&mut self, network: &Network) -> Result<Vec<(String, f64)>, String> {
        let scores = self.0.score(network);
        let mut numbers: Vec<(String, f64)> =
            scores.knn.0.iter().map(|(k, accuracy)| (format!("knn_{k}"), *accuracy)).collect();
        numbers.extend(scores.linear.map(|linear| ("linear".to_string(), linear.accuracy)));
        Ok(numbers)
    }
}
