//! Scores of a network with the head of a classifier, which was trained with it.
//!
//! ```text
//! s = W f(x) + b          f(x) the features of an image after its transform, [D]; s of C classes
//! p = softmax(s)          probabilities of the classes
//! top-1 = share of the images whose class has the largest score
//! loss = -log p_y         y the class of the image
//! ```

use kernels::ops::gemm::{Mat, gemm};
use networks::{ClassHead, Network};
use pipeline::Progress;

use crate::EvalError;
use crate::features::cache::{FeatureCache, features};
use crate::features::columns::FeatureKind;
use crate::images::ImageSet;
use crate::statistics::calibration::Calibration;
use crate::statistics::outcome::Outcome;
use crate::statistics::{Predictions, argmax};

/// Name of the share of images whose class has the largest score.
pub const TOP_1: &str = "top1";

/// Number of images that are scored in one product.
const BATCH: usize = 1024;

/// Number of images that are kept as those with the largest losses.
const N_WORST: usize = 24;

/// Result of a classifier on a set of images.
#[derive(Debug, Clone, PartialEq)]
pub struct Classified {
    /// The predictions, with their classes.
    pub outcome: Outcome,
    /// Number of images that were scored.
    pub n_images: usize,
    /// Number of images that could not be decoded and were left out.
    pub n_bad: usize,
    /// The probabilities of the predictions beside the shares of them that are right.
    pub calibration: Calibration,
    /// Images with the largest losses, the largest first; at most 24.
    pub worst: Vec<ClassifiedImage>,
}

/// An image with its class and the prediction of a classifier.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClassifiedImage {
    /// Index of the image in its set.
    pub image: usize,
    /// Class of the image.
    pub label: u32,
    /// Predicted class.
    pub predicted: u32,
    /// Probability of the predicted class, in percent.
    pub probability: f64,
    /// Cross-entropy of the probabilities with the class of the image, in nats.
    pub loss: f64,
}

impl ClassifiedImage {
    /// Predicts the class of `image`, whose class is `label`, from its `scores`, `[C]`.
    fn from_scores(image: usize, label: u32, scores: &[f32]) -> Self {
        let predicted = argmax(scores);
        let highest = f64::from(scores[predicted as usize]);
        let mut sum = 0.0;
        for score in scores {
            // Differences to the highest score do not overflow.
            sum += (f64::from(*score) - highest).exp();
        }
        let loss = sum.ln() + highest - f64::from(scores[label as usize]);
        Self { image, label, predicted, probability: 100.0 / sum, loss }
    }

    /// Returns whether the prediction is right.
    pub fn is_right(&self) -> bool {
        self.predicted == self.label
    }
}

/// Classifies `images` by `network` and `head`, whose classes have the numbers of those of the
/// images. Images without a class are left out.
///
/// # Errors
/// Errors of [`features`].
pub fn classify(
    network: &Network,
    head: &ClassHead,
    images: &ImageSet,
    cache: Option<&FeatureCache>,
    progress: &dyn Progress,
) -> Result<Classified, EvalError> {
    let wanted = FeatureKind::Vectors { n_levels: 1, average: false };
    let table = features(cache, network, images, wanted, progress)?;
    let mut labels = Vec::with_capacity(table.len());
    for image in &table.images {
        labels.push((*image as usize, images.label(*image as usize)));
    }
    let classified = predict(head, table.rows(), &labels);
    let n_bad = images.len() - table.len();
    Ok(Classified::new(classified, head.classes.len(), n_bad))
}

impl Classified {
    /// Summarizes the predictions for `images`, of `n_classes` classes.
    fn new(mut images: Vec<ClassifiedImage>, n_classes: usize, n_bad: usize) -> Self {
        let n_images = images.len();
        let mut predicted = Vec::with_capacity(n_images);
        let mut labels = Vec::with_capacity(n_images);
        let mut probabilities = Vec::with_capacity(n_images);
        for image in &images {
            predicted.push(image.predicted);
            labels.push(image.label);
            probabilities.push((image.probability, image.is_right()));
        }
        let outcome = Outcome::Predictions(Predictions::new(predicted, &labels, n_classes));
        let calibration = Calibration::new(&probabilities);
        // The order is stable: images of equal losses keep theirs.
        images.sort_by(|a, b| b.loss.total_cmp(&a.loss));
        images.truncate(N_WORST);
        Self { outcome, n_images, n_bad, calibration, worst: images }
    }
}

/// Predicts the class of each of `rows`, `[n, D]`, whose images and classes are `labels`. Images
/// without a class are left out.
fn predict(head: &ClassHead, rows: &[f32], labels: &[(usize, Option<u32>)]) -> Vec<ClassifiedImage> {
    let width = head.width();
    let n_classes = head.classes.len();
    let mut classified = Vec::with_capacity(labels.len());
    for (batch, labels) in rows.chunks(BATCH * width).zip(labels.chunks(BATCH)) {
        let n = labels.len();
        let mut scores = head.bias.repeat(n);
        let features = Mat::rows(batch, width);
        let weight = Mat::rows(&head.weight, width).t();
        gemm([n, width, n_classes], 1.0, features, weight, 1.0, &mut scores, n_classes);
        for (scores, (image, label)) in scores.chunks_exact(n_classes).zip(labels) {
            if let Some(label) = label {
                classified.push(ClassifiedImage::from_scores(*image, *label, scores));
            }
        }
    }
    classified
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Weight and bias count, in every batch of rows.
    #[test]
    fn the_class_with_the_largest_score_is_predicted() {
        let classes = ["a", "b", "c"].map(String::from).to_vec();
        let weight = vec![1.0, 0.0, 0.0, 1.0, 0.0, 0.0];
        let head = ClassHead { classes, weight, bias: vec![0.0, 0.0, 0.5] };
        let rows: Vec<f32> = [[2.0, 1.0], [1.0, 2.0], [0.1, 0.2]].concat();
        let rows = rows.repeat(BATCH);
        let labels: Vec<(usize, Option<u32>)> =
            (0..3 * BATCH).map(|row| (row, (row % 3 != 1).then_some(0))).collect();
        let many = predict(&head, &rows, &labels);
        assert_eq!(many.len(), 2 * BATCH, "a third of the images have no class");
        for (row, pair) in many.chunks_exact(2).enumerate() {
            assert_eq!([pair[0].image, pair[1].image], [3 * row, 3 * row + 2]);
            assert_eq!([pair[0].predicted, pair[1].predicted], [0, 2]);
        }
    }

    /// Scores 0, log 2, log 5 are probabilities of 1/8, 2/8, 5/8.
    #[test]
    fn probabilities_are_those_of_the_softmax() {
        let scores = [0.0, 2.0_f32.ln(), 5.0_f32.ln()];
        let classified = ClassifiedImage::from_scores(7, 1, &scores);
        assert_eq!((classified.image, classified.predicted), (7, 2));
        assert!((classified.probability - 62.5).abs() < 1e-4, "{classified:?}");
        assert!((classified.loss - 4.0_f64.ln()).abs() < 1e-6, "{classified:?}");
        let large = ClassifiedImage::from_scores(0, 0, &[-1000.0, 1000.0]);
        assert_eq!((large.probability, large.loss), (100.0, 2000.0));
    }

    #[test]
    fn images_with_the_largest_losses_come_first() {
        let mut images = Vec::new();
        for image in 0..30 {
            let scores = [0.0, image as f32];
            images.push(ClassifiedImage::from_scores(image, 0, &scores));
        }
        let classified = Classified::new(images, 2, 1);
        assert_eq!((classified.n_images, classified.n_bad, classified.worst.len()), (30, 1, N_WORST));
        let worst: Vec<usize> = classified.worst.iter().map(|image| image.image).collect();
        assert_eq!(worst, (6..30).rev().collect::<Vec<usize>>());
        assert!(!classified.worst[0].is_right());
        let n_binned: u64 = classified.calibration.bins.iter().map(|bin| bin.n).sum();
        assert_eq!(n_binned, 30);
    }
}
