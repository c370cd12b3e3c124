//! Probe of the classifier that a run trains, on images that it is not trained on.

use std::path::{Path, PathBuf};

use eval::row::append;
use eval::scores::classifier_rows;
use eval::{Classified, F1, ImageSet, MEAN_AVERAGE_PRECISION, TOP_1, classify};
use networks::probe::{Probe, WatchedScore};
use networks::{ClassHead, NamedTensor, Network};
use pipeline::Progress;
use pipeline::words::counted;
use trainer::Plan;

use crate::classifier::trained_images;
use crate::error::SessionError;
use crate::evaluated_network::Origin;

/// Number of validations in a run whose recipe sets no interval.
const VALIDATIONS_PER_RUN: u64 = 8;

/// Validation of a run while it trains. The run watches the share of the images that are classified
/// correctly, or the mean average precision if an image may have several classes: the number by which its classifier is scored afterwards: the loss may rise, because
/// probabilities become too extreme, while more images are classified correctly.
pub struct ValidationProbe {
    /// Images to score on, whose classes have the numbers of the run; on rank 0.
    images: Option<ImageSet>,
    workdir: PathBuf,
    plan: Plan,
    /// Creates the receiver of the progress of an evaluation after a number of steps.
    new_progress: fn(u64) -> Box<dyn Progress>,
}

impl ValidationProbe {
    /// Creates the probe of the run of `plan` in `workdir`, which scores its classifier on
    /// `images`. All ranks create it; rank 0 alone needs the images.
    pub fn new(
        plan: &Plan,
        images: Option<ImageSet>,
        workdir: &Path,
        new_progress: fn(u64) -> Box<dyn Progress>,
    ) -> Self {
        Self { images, workdir: workdir.to_path_buf(), plan: plan.clone(), new_progress }
    }

    /// Returns the number of images that it scores.
    pub fn n_images(&self) -> usize {
        self.images.as_ref().map_or(0, ImageSet::len)
    }

    /// Returns the names of the classes, which the plan of a run has.
    fn classes(&self) -> Vec<String> {
        self.plan.recipe.method.classes().unwrap_or_default().to_vec()
    }

    /// Returns whether an image may have several classes.
    fn is_multi_label(&self) -> bool {
        self.plan.recipe.method.is_multi_label()
    }

    /// Returns the name of the score that the run watches.
    fn score_name(&self) -> &'static str {
        if self.is_multi_label() { MEAN_AVERAGE_PRECISION } else { TOP_1 }
    }

    /// Classifies the images after `step` steps; `None` on ranks without any.
    fn classify(
        &self,
        network: &Network,
        head: &ClassHead,
        step: u64,
    ) -> Result<Option<Classified>, SessionError> {
        let Some(images) = &self.images else { return Ok(None) };
        let progress = (self.new_progress)(step);
        Ok(Some(classify(network, head, images, None, &*progress)?))
    }

    /// Classifies the images, and records the result in the run.
    fn evaluate(
        &self,
        network: &Network,
        heads: &[NamedTensor],
        step: u64,
    ) -> Result<Vec<(String, f64)>, SessionError> {
        let Some(images) = &self.images else { return Ok(Vec::new()) };
        let width = self.plan.recipe.model.width();
        let head = ClassHead::from_tensors(self.classes(), self.is_multi_label(), width, heads)?;
        let Some(classified) = self.classify(network, &head, step)? else { return Ok(Vec::new()) };
        let origin = Origin {
            network_name: self.plan.evaluated()?,
            step: Some(step),
            recipe: Some(&self.plan.recipe.name),
            transform: images.transform,
            checkpoint: None,
        };
        let about = origin.describe(network)?;
        let rows = classifier_rows(&classified, Some(trained_images(&self.plan)), images, about);
        // The run writes the numbers to TensorBoard.
        if let Err(error) = append(&self.workdir, &rows) {
            tracing::warn!("could not record the validation of step {step}: {error}");
        }
        let mut numbers = vec![(self.score_name().to_string(), classified.outcome.value())];
        if let Some(decisions) = &classified.decisions {
            numbers.push((F1.into(), decisions.f1()));
        }
        numbers.push(("loss".into(), classified.loss));
        Ok(numbers)
    }
}

/// Returns the number of steps between two validations of a run of `total_steps` steps, whose
/// recipe says `every_steps`: an eighth of the run if that is 0.
pub fn validation_interval(every_steps: u64, total_steps: u64) -> u64 {
    if every_steps > 0 { every_steps } else { total_steps.div_ceil(VALIDATIONS_PER_RUN) }
}

impl Probe for ValidationProbe {
    fn name(&self) -> &str {
        "val"
    }

    fn interval(&self, every_steps: u64, total_steps: u64) -> u64 {
        validation_interval(every_steps, total_steps)
    }

    fn watched(&self) -> Option<WatchedScore> {
        let mut images = String::new();
        if let Some(set) = &self.images {
            images = format!("{} of {}", counted(set.len() as u64, "image"), set.name);
        }
        Some(WatchedScore { name: self.score_name().into(), is_higher_better: true, images })
    }

    fn needs_heads(&self) -> bool {
        true
    }

    fn rehearse(&mut self, network: &Network) -> Result<(), String> {
        let classes = self.classes();
        let weight = vec![0.0; classes.len() * network.model.width()];
        let bias = vec![0.0; classes.len()];
        let head = ClassHead { classes, weight, bias, is_multi_label: self.is_multi_label() };
        match self.classify(network, &head, 0) {
            Ok(_) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn run(
        &mut self,
        network: &Network,
        heads: &[NamedTensor],
        step: u64,
    ) -> Result<Vec<(String, f64)>, String> {
        self.evaluate(network, heads, step).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_validated_eight_times_or_as_the_recipe_says() {
        for (every_steps, total_steps, expected) in [(0, 800, 100), (0, 12, 2), (0, 3, 1), (5, 800, 5)] {
            assert_eq!(validation_interval(every_steps, total_steps), expected);
        }
    }
}
