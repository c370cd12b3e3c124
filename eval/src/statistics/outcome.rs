//! Result of a protocol on a test set: a percentage and the predictions behind it.

use super::Predictions;
use super::ranked::Ranked;
use super::segmented::PixelCounts;

/// Result of a protocol on a test set.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// One class for each image.
    Predictions(Predictions),
    /// A score of each class for each image, which may have several classes.
    Ranked(Ranked),
    /// One class for each pixel.
    PixelCounts(PixelCounts),
}

impl Outcome {
    /// Returns the name of the percentage: `accuracy`, `mAP` or `mIoU`.
    pub fn measure(&self) -> &'static str {
        match self {
            Self::Predictions(_) => "accuracy",
            Self::Ranked(_) => "mAP",
            Self::PixelCounts(_) => "mIoU",
        }
    }

    /// Returns the percentage.
    pub fn value(&self) -> f64 {
        match self {
            Self::Predictions(predictions) => predictions.accuracy(),
            Self::Ranked(ranked) => ranked.mean_average_precision(),
            Self::PixelCounts(counts) => counts.mean_iou(),
        }
    }

    /// Returns the 95 % bootstrap interval of the percentage over test sets of this size, by
    /// resampling the images.
    pub fn interval(&self) -> [f64; 2] {
        match self {
            Self::Predictions(predictions) => predictions.interval(),
            Self::Ranked(ranked) => ranked.interval(),
            Self::PixelCounts(counts) => counts.interval(),
        }
    }

    /// Returns the percentage of each class; `None` for a class without images.
    pub fn by_class(&self) -> Vec<Option<f64>> {
        match self {
            Self::Predictions(predictions) => predictions.by_class(),
            Self::Ranked(ranked) => ranked.by_class(),
            Self::PixelCounts(counts) => counts.by_class(),
        }
    }

    /// Returns the number of images or pixels by true class (rows) and predicted class (columns),
    /// `[classes, classes]`; `None` if images may have several classes.
    pub fn confusion(&self) -> Option<Vec<u64>> {
        match self {
            Self::Predictions(predictions) => {
                Some(predictions.confusion().into_iter().map(u64::from).collect())
            }
            Self::Ranked(_) => None,
            Self::PixelCounts(counts) => Some(counts.confusion().to_vec()),
        }
    }

    /// Returns the number of classes.
    pub fn n_classes(&self) -> usize {
        match self {
            Self::Predictions(predictions) => predictions.n_classes,
            Self::Ranked(ranked) => ranked.n_classes(),
            Self::PixelCounts(counts) => counts.n_classes(),
        }
    }

    /// Returns the `n` most frequent confusions: true class, predicted class, and number of images
    /// or pixels. Ties are ordered by class.
    pub fn most_confused(&self, n: usize) -> Vec<(usize, usize, u64)> {
        let n_classes = self.n_classes();
        let counts = self.confusion().unwrap_or_default().into_iter().enumerate();
        let mut pairs: Vec<(usize, usize, u64)> = counts
            .map(|(cell, count)| (cell / n_classes, cell % n_classes, count))
            .filter(|(label, predicted, count)| label != predicted && *count > 0)
            .collect();
        pairs.sort_by_key(|(_, _, count)| std::cmp::Reverse(*count));
        pairs.truncate(n);
        pairs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_frequent_confusions_come_first() {
        let predictions = Predictions::new(vec![1, 2, 2, 0, 1], &[0, 0, 0, 0, 1], 3);
        assert_eq!(Outcome::Predictions(predictions).most_confused(5), [(0, 2, 2), (0, 1, 1)]);
    }
}
