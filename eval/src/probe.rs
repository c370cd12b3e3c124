//! Both probes on one pair of image sets.

use std::sync::Arc;

use augment::DecodeRules;
use pipeline::Dataset;
use trainer::Network;
use trainer::network::probe::Probe;

use crate::EvalError;
use crate::features::{FeatureSet, ImageSet};
use crate::knn;
use crate::knn::KnnScores;
use crate::linear;
use crate::linear::LinearScore;

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
    /// Labelled images of both sets that could not be decoded and are not part of the numbers.
    pub n_bad: usize,
}

impl Split {
    /// Both sets, seen at `size_px` and decoded by `rules`. Classes are numbered by those that occur in either.
    ///
    /// # Errors
    /// As [`ImageSet::open`].
    pub fn open(
        train: Arc<Dataset>,
        test: Arc<Dataset>,
        size_px: usize,
        rules: DecodeRules,
    ) -> Result<Self, EvalError> {
        let mut train = ImageSet::open(train, size_px, rules, "train")?;
        let mut test = ImageSet::open(test, size_px, rules, "test")?;
        let classes: Vec<u32> = train.classes().union(&test.classes()).copied().collect();
        train.renumber(&classes);
        test.renumber(&classes);
        Ok(Self { train, test })
    }

    /// Both probes on a network's features.
    ///
    /// # Errors
    /// [`EvalError::ImageSize`], or as [`ImageSet::features`].
    pub fn score(&self, network: &Network) -> Result<ProbeScores, EvalError> {
        let (image_px, stride_px) = (self.train.size_px, network.model.stride_px());
        if image_px == 0 || !image_px.is_multiple_of(stride_px) {
            return Err(EvalError::ImageSize { image_px, stride_px });
        }
        Ok(score(&self.train.features(network)?, &self.test.features(network)?, true))
    }

    /// Nearest neighbors on pixels.
    ///
    /// # Errors
    /// As [`ImageSet::pixels`].
    pub fn score_pixels(&self) -> Result<ProbeScores, EvalError> {
        Ok(score(&self.train.pixels()?, &self.test.pixels()?, false))
    }
}

fn score(train: &FeatureSet, test: &FeatureSet, with_linear: bool) -> ProbeScores {
    ProbeScores {
        knn: knn::score(train, test),
        linear: with_linear.then(|| linear::score(train, test, 0)),
        n_bad: train.n_bad + test.n_bad,
    }
}

/// The probe that a run calls every so many steps.
pub struct InTraining(pub Split);

impl Probe for InTraining {
    fn name(&self) -> &str {
        "probe"
    }

    fn run(&mut self, network: &Network) -> Result<Vec<(String, f64)>, String> {
        let scores = self.0.score(network).map_err(|error| error.to_string())?;
        let mut numbers: Vec<(String, f64)> =
            scores.knn.0.iter().map(|(k, accuracy)| (format!("knn_{k}"), *accuracy)).collect();
        numbers.extend(scores.linear.map(|linear| ("linear".to_string(), linear.accuracy)));
        Ok(numbers)
    }
}
