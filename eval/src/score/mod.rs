//! Predictions into numbers.

pub(crate) mod bootstrap;

use rayon::prelude::*;

/// What a classifier made of a test set.
#[derive(Debug, Clone, PartialEq)]
pub struct Classified {
    /// Predicted class of each row.
    pub predicted: Vec<u32>,
    /// True class of each row.
    pub labels: Vec<u32>,
    /// Classes.
    pub n_classes: usize,
}

impl Classified {
    /// Rows whose class was found, in percent.
    pub fn accuracy(&self) -> f64 {
        let correct = self.hits().filter(|hit| *hit).count();
        100.0 * correct as f64 / self.labels.len().max(1) as f64
    }

    /// Bounds of the accuracy, in percent: the middle 95 % of what other test sets of this size would have given, by
    /// resampling the rows.
    pub fn interval(&self) -> [f64; 2] {
        let hits: Vec<f64> = self.hits().map(|hit| if hit { 100.0 } else { 0.0 }).collect();
        bootstrap::interval_of_mean(&hits)
    }

    /// Accuracy of each class in percent; `None` for a class that no row has.
    pub fn by_class(&self) -> Vec<Option<f64>> {
        let of_class = |counts: (usize, &[u32])| {
            let (class, counts) = counts;
            let n: u32 = counts.iter().sum();
            (n > 0).then(|| 100.0 * f64::from(counts[class]) / f64::from(n))
        };
        self.confusion().chunks_exact(self.n_classes).enumerate().map(of_class).collect()
    }

    /// Rows by true class (rows) and predicted class (columns), `[classes, classes]`.
    pub fn confusion(&self) -> Vec<u32> {
        let mut counts = vec![0; self.n_classes * self.n_classes];
        for (predicted, label) in self.predicted.iter().zip(&self.labels) {
            counts[*label as usize * self.n_classes + *predicted as usize] += 1;
        }
        counts
    }

    fn hits(&self) -> impl Iterator<Item = bool> {
        self.predicted.iter().zip(&self.labels).map(|(predicted, label)| predicted == label)
    }
}

/// The class with the largest of each row's scores, `[n, classes]`; of equal ones the first.
pub(crate) fn largest(scores: &[f32], n_classes: usize) -> Vec<u32> {
    let best = |row: &[f32]| {
        let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
        best.map_or(0, |(class, _)| class as u32)
    };
    scores.par_chunks_exact(n_classes).map(best).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_counted_by_what_they_are_and_what_they_were_taken_for() {
        let scored = Classified { predicted: vec![0, 1, 1, 0], labels: vec![0, 0, 1, 0], n_classes: 3 };
        assert_eq!(scored.accuracy(), 75.0);
        assert_eq!(scored.confusion(), [2, 1, 0, 0, 1, 0, 0, 0, 0]);
        assert_eq!(scored.by_class(), [Some(200.0 / 3.0), Some(100.0), None]);
        let [low, high] = scored.interval();
        assert!((0.0..75.0).contains(&low) && (75.0..=100.0).contains(&high), "{low} {high}");
    }

    #[test]
    fn of_equal_scores_the_first_class_wins() {
        assert_eq!(largest(&[0.5, 0.5, 0.1, 0.0, 0.2, 0.2], 3), [0, 1]);
    }
}
