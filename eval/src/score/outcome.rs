//! What a protocol found on a test set: a percentage, and what it is made of.

use super::Classified;
use super::ranked::Ranked;
use super::segmented::Segmented;

/// What was found.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// One class for each image.
    Classified(Classified),
    /// A score of each class for each image, of which several may be right.
    Ranked(Ranked),
    /// One class for each pixel.
    Segmented(Segmented),
}

impl Outcome {
    /// What the percentage is: `accuracy`, `mAP` or `mIoU`.
    pub fn measure(&self) -> &'static str {
        match self {
            Self::Classified(_) => "accuracy",
            Self::Ranked(_) => "mAP",
            Self::Segmented(_) => "mIoU",
        }
    }

    /// The percentage.
    pub fn value(&self) -> f64 {
        match self {
            Self::Classified(found) => found.accuracy(),
            Self::Ranked(found) => found.mean_average_precision(),
            Self::Segmented(found) => found.mean_iou(),
        }
    }

    /// Its bounds: the middle 95 % of what other test sets of this size would have given, by resampling the images.
    pub fn interval(&self) -> [f64; 2] {
        match self {
            Self::Classified(found) => found.interval(),
            Self::Ranked(found) => found.interval(),
            Self::Segmented(found) => found.interval(),
        }
    }

    /// The percentage of each class; `None` for a class that no image has.
    pub fn by_class(&self) -> Vec<Option<f64>> {
        match self {
            Self::Classified(found) => found.by_class(),
            Self::Ranked(found) => found.by_class(),
            Self::Segmented(found) => found.by_class(),
        }
    }

    /// Images or pixels by true class (rows) and predicted class (columns), `[classes, classes]`; `None` where several
    /// classes may be right.
    pub fn confusion(&self) -> Option<Vec<u64>> {
        match self {
            Self::Classified(found) => Some(found.confusion().into_iter().map(u64::from).collect()),
            Self::Ranked(_) => None,
            Self::Segmented(found) => Some(found.confusion().to_vec()),
        }
    }

    /// Classes.
    pub fn n_classes(&self) -> usize {
        match self {
            Self::Classified(found) => found.n_classes,
            Self::Ranked(found) => found.n_classes(),
            Self::Segmented(found) => found.n_classes(),
        }
    }

    /// The `n` most frequent confusions: true class, predicted class, and images or pixels. Of equally frequent ones the
    /// first classes come first.
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
        let found = Classified::new(vec![1, 2, 2, 0, 1], &[0, 0, 0, 0, 1], 3);
        assert_eq!(Outcome::Classified(found).most_confused(5), [(0, 2, 2), (0, 1, 1)]);
    }
}
