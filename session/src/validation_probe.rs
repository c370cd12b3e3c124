//! Probe of the classifier or the decoder that a run trains, on images that it is not trained on.

use std::path::{Path, PathBuf};

use eval::row::{EvaluationRow, append};
use eval::scores::{classifier_rows, mask_rows};
use eval::{
    Classified, F1, ImageSet, MEAN_AVERAGE_PRECISION, MEAN_IOU, PIXEL_ACCURACY, Segmented, TOP_1, classify,
    segment,
};
use networks::probe::{Probe, WatchedScore};
use networks::{ClassHead, NamedTensor, Network, PixelHead};
use pipeline::Progress;
use pipeline::words::counted;
use trainer::Plan;

use crate::classifier::trained_images;
use crate::error::SessionError;
use crate::evaluated_network::Origin;
use crate::head::TrainedHead;

/// Number of validations in a run whose recipe sets no interval.
const VALIDATIONS_PER_RUN: u64 = 8;

/// Validation of a run while it trains. The run watches the number by which its head is scored
/// afterwards: the share of the images that are classified correctly, the mean average precision if
/// an image may have several classes, or the mean intersection over union of a decoder of pixels.
/// The loss may rise, because probabilities become too extreme, while more images are classified
/// correctly.
pub struct ValidationProbe {
    /// Images to score on, whose classes have the numbers of the run; on rank 0.
    images: Option<ImageSet>,
    /// Hash that identifies the images; `None` where there are none, or if it is not known.
    fingerprint: Option<String>,
    workdir: PathBuf,
    plan: Plan,
    /// Creates the receiver of the progress of an evaluation after a number of steps.
    new_progress: fn(u64) -> Box<dyn Progress>,
}

/// Result of a validation.
struct Validated {
    /// Rows that record it.
    rows: Vec<EvaluationRow>,
    /// Its numbers by name.
    numbers: Vec<(String, f64)>,
}

impl ValidationProbe {
    /// Creates the probe of the run of `plan` in `workdir`, which scores its classifier or its
    /// decoder on `images`. All ranks create it; rank 0 alone needs the images.
    pub fn new(
        plan: &Plan,
        images: Option<ImageSet>,
        workdir: &Path,
        new_progress: fn(u64) -> Box<dyn Progress>,
    ) -> Self {
        let fingerprint = images.as_ref().and_then(fingerprint);
        Self { images, fingerprint, workdir: workdir.to_path_buf(), plan: plan.clone(), new_progress }
    }

    /// Returns the number of images that it scores.
    pub fn n_images(&self) -> usize {
        self.images.as_ref().map_or(0, ImageSet::len)
    }

    /// Returns the name of the score that the run watches.
    fn score_name(&self) -> &'static str {
        let method = &self.plan.recipe.method;
        if method.pixel_classes().is_some() {
            MEAN_IOU
        } else if method.is_multi_label() {
            MEAN_AVERAGE_PRECISION
        } else {
            TOP_1
        }
    }

    /// Classifies `images` by `head` after `step` steps.
    fn classify(
        &self,
        network: &Network,
        head: &ClassHead,
        images: &ImageSet,
        step: u64,
    ) -> Result<Classified, SessionError> {
        let progress = (self.new_progress)(step);
        Ok(classify(network, head, images, None, &*progress)?)
    }

    /// Labels the pixels of `images` by `head` after `step` steps.
    fn segment(
        &self,
        network: &Network,
        head: &PixelHead,
        images: &ImageSet,
        step: u64,
    ) -> Result<Segmented, SessionError> {
        let progress = (self.new_progress)(step);
        Ok(segment(network, head, images, &*progress)?)
    }

    /// Scores a head of zeros on the images, and records nothing.
    fn score_zeros(&self, network: &Network) -> Result<(), SessionError> {
        let Some(images) = &self.images else { return Ok(()) };
        match TrainedHead::zeros(&self.plan.recipe) {
            Some(TrainedHead::Classifier(head)) => {
                self.classify(network, &head, images, 0)?;
            }
            Some(TrainedHead::Decoder(head)) => {
                self.segment(network, &head, images, 0)?;
            }
            None => {}
        }
        Ok(())
    }

    /// Scores the head whose parameters are `heads` on the images, and records the result in the
    /// run.
    fn evaluate(
        &self,
        network: &Network,
        heads: &[NamedTensor],
        step: u64,
    ) -> Result<Vec<(String, f64)>, SessionError> {
        let Some(images) = &self.images else { return Ok(Vec::new()) };
        let Some(head) = TrainedHead::find(&self.plan.recipe, heads)? else { return Ok(Vec::new()) };
        let origin = Origin {
            network_name: self.plan.evaluated()?,
            step: Some(step),
            recipe: Some(&self.plan.recipe.name),
            transform: images.transform,
            checkpoint: None,
        };
        let about = origin.describe(network)?;
        let train = Some(trained_images(&self.plan));
        let validated = match &head {
            TrainedHead::Classifier(head) => {
                let classified = self.classify(network, head, images, step)?;
                Validated {
                    rows: classifier_rows(&classified, train, images, about),
                    numbers: self.classifier_numbers(&classified),
                }
            }
            TrainedHead::Decoder(head) => {
                let segmented = self.segment(network, head, images, step)?;
                Validated {
                    rows: mask_rows(&segmented, &head.classes, train, images, about),
                    numbers: decoder_numbers(&segmented),
                }
            }
        };
        // The run writes the numbers to TensorBoard.
        if let Err(error) = append(&self.workdir, &validated.rows) {
            tracing::warn!("could not record the validation of step {step}: {error}");
        }
        Ok(validated.numbers)
    }

    /// Returns the numbers of a classifier by name.
    fn classifier_numbers(&self, classified: &Classified) -> Vec<(String, f64)> {
        let mut numbers = vec![(self.score_name().to_string(), classified.outcome.value())];
        if let Some(decisions) = &classified.decisions {
            numbers.push((F1.into(), decisions.f1()));
        }
        numbers.push(("loss".into(), classified.loss));
        numbers
    }
}

/// Returns a hash that identifies `images`; `None` if they cannot be read, which the validation
/// reports.
fn fingerprint(images: &ImageSet) -> Option<String> {
    match images.identity() {
        Ok(identity) => Some(format!("{identity:016x}")),
        Err(error) => {
            tracing::warn!("the images of {} are recognized by their number alone: {error}", images.name);
            None
        }
    }
}

/// Returns the numbers of a decoder by name.
fn decoder_numbers(segmented: &Segmented) -> Vec<(String, f64)> {
    let counts = &segmented.counts;
    vec![(MEAN_IOU.into(), counts.mean_iou()), (PIXEL_ACCURACY.into(), counts.accuracy())]
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
        Some(WatchedScore {
            name: self.score_name().into(),
            is_higher_better: true,
            images,
            fingerprint: self.fingerprint.clone(),
        })
    }

    fn needs_heads(&self) -> bool {
        true
    }

    fn rehearse(&mut self, network: &Network) -> Result<(), String> {
        self.score_zeros(network).map_err(|error| error.to_string())
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
