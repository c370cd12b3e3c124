//! Scores of a network with the head of a classifier, which was trained with it.
//!
//! ```text
//! s = W f(x) + b          f(x) the features of an image after its transform, [D]; s of C classes
//! top-1 = share of the images whose class has the largest score
//! ```

use kernels::ops::gemm::{Mat, gemm};
use networks::{ClassHead, Network};
use pipeline::Progress;

use crate::EvalError;
use crate::features::cache::{FeatureCache, features};
use crate::features::columns::FeatureKind;
use crate::images::ImageSet;
use crate::statistics::outcome::Outcome;
use crate::statistics::{Predictions, largest};

/// Name of the share of images whose class has the largest score.
pub const TOP_1: &str = "top1";

/// Number of images that are scored in one product.
const BATCH: usize = 1024;

/// Result of a classifier on a set of images.
#[derive(Debug, Clone, PartialEq)]
pub struct Classified {
    /// The predictions, with their classes.
    pub outcome: Outcome,
    /// Number of images that were scored.
    pub n_images: usize,
    /// Number of images that could not be decoded and were left out.
    pub n_bad: usize,
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
    let predictions = predict(head, table.rows());
    let mut predicted = Vec::with_capacity(table.len());
    let mut labels = Vec::with_capacity(table.len());
    for (image, class) in table.images.iter().zip(predictions) {
        if let Some(label) = images.label(*image as usize) {
            predicted.push(class);
            labels.push(label);
        }
    }
    let n_images = labels.len();
    let n_bad = images.len() - table.len();
    let outcome = Outcome::Predictions(Predictions::new(predicted, &labels, head.classes.len()));
    Ok(Classified { outcome, n_images, n_bad })
}

/// Returns the class with the largest score of each of `rows`, `[n, D]`.
fn predict(head: &ClassHead, rows: &[f32]) -> Vec<u32> {
    let width = head.width();
    let n_classes = head.classes.len();
    let mut predictions = Vec::with_capacity(rows.len() / width);
    for batch in rows.chunks(BATCH * width) {
        let n = batch.len() / width;
        let mut scores = head.bias.repeat(n);
        let features = Mat::rows(batch, width);
        let weight = Mat::rows(&head.weight, width).t();
        gemm([n, width, n_classes], 1.0, features, weight, 1.0, &mut scores, n_classes);
        predictions.extend(largest(&scores, n_classes));
    }
    predictions
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
        assert_eq!(predict(&head, &rows), [0, 1, 2]);
        let many = predict(&head, &rows.repeat(BATCH));
        assert_eq!(many.len(), 3 * BATCH);
        assert!(many.chunks_exact(3).all(|classes| classes == [0, 1, 2]));
    }
}
