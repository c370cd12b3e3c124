//! Statistics of predictions: accuracies, intervals, confusion matrices, F1 and calibration.

pub(crate) mod bootstrap;
pub(crate) mod calibration;
pub(crate) mod decisions;
pub(crate) mod outcome;
pub(crate) mod ranked;
pub(crate) mod segmented;

use rayon::prelude::*;

/// Predictions on a test set.
#[derive(Debug, Clone, PartialEq)]
pub struct Predictions {
    /// Predicted class of each row.
    pub predicted: Vec<u32>,
    /// True class of each row.
    pub labels: Vec<u32>,
    /// Number of classes.
    pub n_classes: usize,
    /// Number of tries on the whole test set, whose rows are concatenated.
    pub n_tries: usize,
}

impl Predictions {
    /// Returns one prediction of each row.
    pub(crate) fn new(predicted: Vec<u32>, labels: &[u32], n_classes: usize) -> Self {
        Self { predicted, labels: labels.to_vec(), n_classes, n_tries: 1 }
    }

    /// Returns the share of correctly predicted rows, in percent.
    pub fn accuracy(&self) -> f64 {
        let correct = self.hits().filter(|hit| *hit).count();
        100.0 * correct as f64 / self.labels.len().max(1) as f64
    }

    /// Returns the 95 % bootstrap interval of the accuracy over test sets of this size, in percent.
    /// Images are resampled, not tries.
    pub fn interval(&self) -> [f64; 2] {
        let mut per_image = vec![0.0; self.labels.len() / self.n_tries.max(1)];
        let n_images = per_image.len().max(1);
        for (row, hit) in self.hits().enumerate() {
            per_image[row % n_images] += if hit { 100.0 / self.n_tries as f64 } else { 0.0 };
        }
        bootstrap::interval_of_mean(&per_image)
    }

    /// Returns the accuracy of each class in percent; `None` for a class without rows.
    pub fn by_class(&self) -> Vec<Option<f64>> {
        self.confusion()
            .chunks_exact(self.n_classes)
            .enumerate()
            .map(|(class, counts)| {
                let n: u32 = counts.iter().sum();
                (n > 0).then(|| 100.0 * f64::from(counts[class]) / f64::from(n))
            })
            .collect()
    }

    /// Returns the number of rows by true class (rows) and predicted class (columns), `[classes,
    /// classes]`.
    pub fn confusion(&self) -> Vec<u32> {
        let mut counts = vec![0; self.n_classes * self.n_classes];
        for (predicted, label) in self.predicted.iter().zip(&self.labels) {
            counts[*label as usize * self.n_classes + *predicted as usize] += 1;
        }
        counts
    }

    /// Returns whether each prediction is correct.
    fn hits(&self) -> impl Iterator<Item = bool> {
        self.predicted.iter().zip(&self.labels).map(|(predicted, label)| predicted == label)
    }
}

/// Returns the class with the largest score of each row of `scores`, `[n, classes]`; the first
/// among equals.
pub(crate) fn largest<T: PartialOrd + Copy + Sync>(scores: &[T], n_classes: usize) -> Vec<u32> {
    scores.par_chunks_exact(n_classes).map(argmax).collect()
}

/// Returns the index of the largest score, the first among equals; 0 if there is none. NaN is never
/// the largest.
pub(crate) fn argmax<T: PartialOrd + Copy>(scores: &[T]) -> u32 {
    let mut best: Option<(usize, T)> = None;
    for (index, score) in scores.iter().enumerate() {
        // `partial_cmp` of a NaN with itself is `None`.
        if score.partial_cmp(score).is_some() && best.is_none_or(|(_, largest)| *score > largest) {
            best = Some((index, *score));
        }
    }
    best.map_or(0, |(index, _)| index as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn confusions_are_counted_by_true_and_predicted_class() {
        let scored = Predictions::new(vec![0, 1, 1, 0], &[0, 0, 1, 0], 3);
        assert_eq!(scored.accuracy(), 75.0);
        assert_eq!(scored.confusion(), [2, 1, 0, 0, 1, 0, 0, 0, 0]);
        assert_eq!(scored.by_class(), [Some(200.0 / 3.0), Some(100.0), None]);
        let [low, high] = scored.interval();
        assert!((0.0..75.0).contains(&low) && (75.0..=100.0).contains(&high), "{low} {high}");
    }

    /// Several tries on the same images do not count as more images.
    #[test]
    fn tries_do_not_narrow_the_interval() {
        let labels = vec![0; 100];
        let predicted: Vec<u32> = (0..100).map(|i| i % 2).collect();
        let once = Predictions::new(predicted.clone(), &labels, 2);
        let thrice =
            Predictions { n_tries: 3, ..Predictions::new(predicted.repeat(3), &labels.repeat(3), 2) };
        assert_eq!(once.accuracy(), thrice.accuracy());
        for (a, b) in once.interval().iter().zip(thrice.interval()) {
            assert!((a - b).abs() < 1e-9, "{:?}", thrice.interval());
        }
    }

    #[test]
    fn the_first_of_equal_scores_wins() {
        assert_eq!(largest(&[0.5, 0.5, 0.1, 0.0, 0.2, 0.2], 3), [0, 1]);
        assert_eq!(argmax(&[f32::NAN, 0.1, f32::NAN]), 1);
    }
}
