//! Scores of a network with the head of a classifier, which was trained with it.
//!
//! ```text
//! s = W f(x) + b          f(x) the features of an image after its transform, [D]; s of C classes
//!
//! one class per image
//! p = softmax(s)          probabilities of the classes
//! top-1 = share of the images whose class has the largest score
//! loss = -log p_y         y the class of the image
//!
//! several, one or none
//! p = σ(s)                probability of each class by itself
//! mAP = mean over the classes of the average precision of their scores
//! F1 = that of the classes with p > 0.5, over all images
//! loss = mean over the classes of -log p_c, or of -log (1 - p_c) if the image is not of class c
//! ```

use kernels::ops::gemm::{Mat, gemm};
use networks::{ClassHead, Network};
use pipeline::Progress;

use crate::EvalError;
use crate::features::cache::{FeatureCache, features};
use crate::features::columns::FeatureKind;
use crate::images::ImageSet;
use crate::statistics::calibration::Calibration;
use crate::statistics::decisions::Decisions;
use crate::statistics::outcome::Outcome;
use crate::statistics::ranked::Ranked;
use crate::statistics::{Predictions, argmax};

/// Name of the share of images whose class has the largest score.
pub const TOP_1: &str = "top1";

/// Name of the mean average precision of a classifier of images with several classes.
pub const MEAN_AVERAGE_PRECISION: &str = "mAP";

/// Name of the F1 of its classes with a probability above 0.5.
pub const F1: &str = "F1";

/// Names of the main scores of a classifier, of one class per image and of several.
pub const CLASSIFIER_METRICS: [&str; 2] = [TOP_1, MEAN_AVERAGE_PRECISION];

/// Number of images that are scored in one product.
const BATCH: usize = 1024;

/// Number of images that are kept as those with the largest losses.
const N_WORST: usize = 24;

/// Result of a classifier on a set of images.
#[derive(Debug, Clone, PartialEq)]
pub struct Classified {
    /// The predictions, with their classes.
    pub outcome: Outcome,
    /// Which classes have a probability above 0.5, if an image may have several.
    pub decisions: Option<Decisions>,
    /// Number of images that were scored.
    pub n_images: usize,
    /// Number of images that could not be decoded and were left out.
    pub n_bad: usize,
    /// Mean cross-entropy of the probabilities with the classes of the images, in nats.
    pub loss: f64,
    /// The probabilities of the predictions beside the shares of them that are right.
    pub calibration: Calibration,
    /// Images with the largest losses, the largest first; at most 24.
    pub worst: Vec<ClassifiedImage>,
}

/// An image with its classes and the prediction of a classifier.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassifiedImage {
    /// Index of the image in its set.
    pub image: usize,
    /// Classes of the image in ascending order: one, if it may not have several.
    pub labels: Vec<u32>,
    /// Predicted classes in ascending order: one, or those with a probability above 0.5 if an image
    /// may have several.
    pub predicted: Vec<u32>,
    /// Largest probability of a class, in percent: that of the predicted class, if there is one.
    pub probability: f64,
    /// Cross-entropy of the probabilities with the class of the image, in nats; the mean over the
    /// classes of the binary cross-entropy, if it may have several.
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
        let labels = vec![label];
        Self { image, labels, predicted: vec![predicted], probability: 100.0 / sum, loss }
    }

    /// Predicts the classes of `image`, which has the classes `labels`, each by itself, from its
    /// `scores`, `[C]`.
    fn from_multi_label_scores(image: usize, mut labels: Vec<u32>, scores: &[f32]) -> Self {
        labels.sort_unstable();
        let mut predicted = Vec::new();
        let mut highest = 0.0;
        let mut loss = 0.0;
        for (class, score) in (0..).zip(scores) {
            let score = f64::from(*score);
            if score > 0.0 {
                predicted.push(class);
            }
            highest = sigmoid(score).max(highest);
            let wanted = if labels.contains(&class) { score } else { -score };
            // -log σ(wanted), without overflow.
            loss += (-wanted).max(0.0) + (-wanted.abs()).exp().ln_1p();
        }
        let loss = loss / scores.len().max(1) as f64;
        Self { image, labels, predicted, probability: 100.0 * highest, loss }
    }

    /// Returns whether the prediction is right.
    pub fn is_right(&self) -> bool {
        self.predicted == self.labels
    }
}

/// Returns the probability of a class with this score, where an image may have several.
fn sigmoid(score: f64) -> f64 {
    1.0 / (1.0 + (-score).exp())
}

/// Returns the names of the classes `numbers` among `classes`, with commas between them.
pub fn class_names(numbers: &[u32], classes: &[String]) -> String {
    if numbers.is_empty() {
        return "no class".into();
    }
    let names: Vec<&str> = numbers.iter().map(|number| classes[*number as usize].as_str()).collect();
    names.join(", ")
}

/// Classifies `images` by `network` and `head`, whose classes have the numbers of those of the
/// images. Images without a class are left out, unless an image may have several classes, or none.
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
    let wanted = FeatureKind::LAST_LEVEL;
    let table = features(cache, network, images, wanted, progress)?;
    let n_bad = images.len() - table.len();
    if head.is_multi_label {
        let mut labels = Vec::with_capacity(table.len());
        for image in &table.images {
            labels.push((*image as usize, images.labels(*image as usize)));
        }
        let scores = all_scores(head, table.rows());
        return Ok(Classified::from_multi_label(&scores, labels, head.classes.len(), n_bad));
    }
    let mut labels = Vec::with_capacity(table.len());
    for image in &table.images {
        labels.push((*image as usize, images.label(*image as usize)));
    }
    let classified = predict(head, table.rows(), &labels);
    Ok(Classified::new(classified, head.classes.len(), n_bad))
}

impl Classified {
    /// Summarizes the predictions for `images`, of `n_classes` classes.
    fn new(images: Vec<ClassifiedImage>, n_classes: usize, n_bad: usize) -> Self {
        let n_images = images.len();
        let mut predicted: Vec<u32> = Vec::with_capacity(n_images);
        let mut labels: Vec<u32> = Vec::with_capacity(n_images);
        let mut probabilities = Vec::with_capacity(n_images);
        for image in &images {
            predicted.extend(&image.predicted);
            labels.extend(&image.labels);
            probabilities.push((image.probability, image.is_right()));
        }
        let outcome = Outcome::Predictions(Predictions::new(predicted, &labels, n_classes));
        let calibration = Calibration::new(probabilities);
        let loss = mean_loss(&images);
        Self { outcome, decisions: None, n_images, n_bad, loss, calibration, worst: worst(images) }
    }

    /// Summarizes `scores`, `[n, n_classes]`, of images that may have several classes: `labels` are
    /// their indices and classes.
    fn from_multi_label(
        scores: &[f32],
        labels: Vec<(usize, Vec<u32>)>,
        n_classes: usize,
        n_bad: usize,
    ) -> Self {
        let n_images = labels.len();
        let mut images = Vec::with_capacity(n_images);
        let mut truths = Vec::with_capacity(n_images);
        let mut decisions = Decisions::default();
        for ((image, labels), scores) in labels.into_iter().zip(scores.chunks_exact(n_classes)) {
            let image = ClassifiedImage::from_multi_label_scores(image, labels, scores);
            decisions.add(&image.predicted, &image.labels);
            truths.push(image.labels.clone());
            images.push(image);
        }
        let calibration =
            Calibration::new(ClassProbabilities { scores, truths: &truths, n_classes, next: 0 });
        let outcome = Outcome::Ranked(Ranked::new(scores, n_classes, &truths));
        let loss = mean_loss(&images);
        Self { outcome, decisions: Some(decisions), n_images, n_bad, loss, calibration, worst: worst(images) }
    }
}

/// Returns the mean loss of `images`.
fn mean_loss(images: &[ClassifiedImage]) -> f64 {
    let sum: f64 = images.iter().map(|image| image.loss).sum();
    sum / images.len() as f64
}

/// Returns those of `images` with the largest losses, the largest first.
fn worst(mut images: Vec<ClassifiedImage>) -> Vec<ClassifiedImage> {
    // The order is stable: images of equal losses keep theirs.
    images.sort_by(|a, b| b.loss.total_cmp(&a.loss));
    images.truncate(N_WORST);
    images
}

/// Probability in percent of each class of each image, and whether the image has the class, one
/// after another.
struct ClassProbabilities<'a> {
    /// Scores of the classes, `[n, C]`.
    scores: &'a [f32],
    /// Classes of each image.
    truths: &'a [Vec<u32>],
    n_classes: usize,
    /// Index of the next score.
    next: usize,
}

impl Iterator for ClassProbabilities<'_> {
    type Item = (f64, bool);

    fn next(&mut self) -> Option<(f64, bool)> {
        let score = self.scores.get(self.next)?;
        let truth = self.truths.get(self.next / self.n_classes)?;
        let class = (self.next % self.n_classes) as u32;
        self.next += 1;
        Some((100.0 * sigmoid(f64::from(*score)), truth.contains(&class)))
    }
}

/// Predicts the class of each of `rows`, `[n, D]`, whose images and classes are `labels`. Images
/// without a class are left out.
fn predict(head: &ClassHead, rows: &[f32], labels: &[(usize, Option<u32>)]) -> Vec<ClassifiedImage> {
    let n_classes = head.classes.len();
    let mut classified = Vec::with_capacity(labels.len());
    for (batch, labels) in rows.chunks(BATCH * head.width()).zip(labels.chunks(BATCH)) {
        let scores = batch_scores(head, batch);
        for (scores, (image, label)) in scores.chunks_exact(n_classes).zip(labels) {
            if let Some(label) = label {
                classified.push(ClassifiedImage::from_scores(*image, *label, scores));
            }
        }
    }
    classified
}

/// Returns the scores of all classes for `rows`, `[n, D]`: `[n, C]`.
fn all_scores(head: &ClassHead, rows: &[f32]) -> Vec<f32> {
    let mut scores = Vec::new();
    for batch in rows.chunks(BATCH * head.width()) {
        scores.extend(batch_scores(head, batch));
    }
    scores
}

/// Returns the scores of all classes for a batch of `rows`, `[n, D]`: `[n, C]`.
fn batch_scores(head: &ClassHead, rows: &[f32]) -> Vec<f32> {
    let width = head.width();
    let n_classes = head.classes.len();
    let n = rows.len() / width;
    let mut scores = head.bias.repeat(n);
    let features = Mat::rows(rows, width);
    let weight = Mat::rows(&head.weight, width).t();
    gemm([n, width, n_classes], 1.0, features, weight, 1.0, &mut scores, n_classes);
    scores
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Weight and bias count, in every batch of rows.
    #[test]
    fn the_class_with_the_largest_score_is_predicted() {
        let classes = ["a", "b", "c"].map(String::from).to_vec();
        let weight = vec![1.0, 0.0, 0.0, 1.0, 0.0, 0.0];
        let head = ClassHead { classes, weight, bias: vec![0.0, 0.0, 0.5], is_multi_label: false };
        let rows: Vec<f32> = [[2.0, 1.0], [1.0, 2.0], [0.1, 0.2]].concat();
        let rows = rows.repeat(BATCH);
        let labels: Vec<(usize, Option<u32>)> =
            (0..3 * BATCH).map(|row| (row, (row % 3 != 1).then_some(0))).collect();
        let many = predict(&head, &rows, &labels);
        assert_eq!(many.len(), 2 * BATCH, "a third of the images have no class");
        for (row, pair) in many.chunks_exact(2).enumerate() {
            assert_eq!([pair[0].image, pair[1].image], [3 * row, 3 * row + 2]);
            assert_eq!((pair[0].predicted[0], pair[1].predicted[0]), (0, 2));
        }
    }

    /// Scores 0, log 2, log 5 are probabilities of 1/8, 2/8, 5/8.
    #[test]
    fn probabilities_are_those_of_the_softmax() {
        let scores = [0.0, 2.0_f32.ln(), 5.0_f32.ln()];
        let classified = ClassifiedImage::from_scores(7, 1, &scores);
        assert_eq!((classified.image, classified.predicted.as_slice()), (7, &[2][..]));
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
        // Scores of 0 and k have a loss of log(1 + e^k).
        let expected = (0..30).map(|k| f64::from(k).exp().ln_1p()).sum::<f64>() / 30.0;
        assert!((classified.loss - expected).abs() < 1e-6, "{}", classified.loss);
        let n_binned: u64 = classified.calibration.bins.iter().map(|bin| bin.n).sum();
        assert_eq!(n_binned, 30);
    }

    /// Scores of log 3 and -log 3 are probabilities of 3/4 and 1/4: the image has the first of
    /// three classes and lacks the second, and it is missed that it has the third.
    #[test]
    fn probabilities_of_several_classes_are_sigmoids() {
        let likely = 3.0_f32.ln();
        let scores = [likely, likely, -likely];
        let classified = ClassifiedImage::from_multi_label_scores(4, vec![2, 0], &scores);
        assert_eq!(
            (classified.labels.as_slice(), classified.predicted.as_slice()),
            (&[0, 2][..], &[0, 1][..])
        );
        assert!((classified.probability - 75.0).abs() < 1e-4, "{classified:?}");
        let expected = -(0.75_f64.ln() + 0.25_f64.ln() + 0.25_f64.ln()) / 3.0;
        assert!((classified.loss - expected).abs() < 1e-6, "{classified:?}");
        assert!(!classified.is_right());
        let large = ClassifiedImage::from_multi_label_scores(0, vec![1], &[-1000.0, 1000.0]);
        assert_eq!((large.probability, large.loss, large.is_right()), (100.0, 0.0, true));
    }

    /// Three images of two classes, the last of none: the average precisions are 1 and 1/2 · 1/2 +
    /// 1/2 · 2/3, and three of four named classes are right, of three that are present.
    #[test]
    fn several_classes_are_ranked_and_decided() {
        let scores = [2.0, 1.0, -1.0, 2.0, -2.0, 3.0];
        let labels = vec![(0, vec![0, 1]), (2, vec![1]), (5, vec![])];
        let classified = Classified::from_multi_label(&scores, labels, 2, 1);
        assert_eq!((classified.n_images, classified.n_bad), (3, 1));
        assert_eq!(classified.outcome.measure(), MEAN_AVERAGE_PRECISION);
        assert_eq!(classified.outcome.by_class()[0], Some(100.0));
        let second = classified.outcome.by_class()[1].unwrap();
        assert!((second - 100.0 * (0.5 / 2.0 + 0.5 * 2.0 / 3.0)).abs() < 1e-9, "{second}");
        let f1 = classified.decisions.as_ref().unwrap().f1();
        assert!((f1 - 100.0 * 6.0 / 7.0).abs() < 1e-9, "{f1}");
        let n_binned: u64 = classified.calibration.bins.iter().map(|bin| bin.n).sum();
        assert_eq!(n_binned, 6, "a decision about every class of every image");
        assert_eq!(classified.worst[0].image, 5);
        let names = ["cat", "dog"].map(String::from);
        assert_eq!(class_names(&classified.worst[0].labels, &names), "no class");
        assert_eq!(class_names(&[0, 1], &names), "cat, dog");
    }
}
