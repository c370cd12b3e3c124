//! A linear probe whose learning rate is never chosen on the test set: softmax regression on
//! standardized features.
//!
//! ```text
//! x̂ = (x - mean) / std over train;  logits = W x̂ + b, one (W, b) per learning rate, from zero
//! SGD with momentum 0.9 and no weight decay on mini-batches, cosine to zero
//! the rate is chosen on a held-out fifth of train; then W, b are fitted again on all of train
//! ```

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::batches::{BatchReader, Standardization, classified, cosine, hold_out};
use super::heads::{HeadTraining, Heads};
use super::task::{Scored, Task};
use super::{Needs, Rules};
use crate::EvalError;
use crate::features::set::FeatureSet;
use crate::statistics::Predictions;
use crate::statistics::outcome::Outcome;

/// Held-out share of the rows: one in this many.
const HELD_OUT: usize = 5;

/// The protocol's settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearHonest {
    /// Candidate learning rates.
    pub rates: Vec<f64>,
    /// Number of passes over train.
    pub epochs: usize,
    /// Images per mini-batch.
    pub batch: usize,
}

impl Default for LinearHonest {
    fn default() -> Self {
        Self { rates: vec![0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0], epochs: 30, batch: 128 }
    }
}

impl Rules for LinearHonest {
    fn needs(&self) -> Needs {
        Needs::VECTORS
    }

    fn in_words(&self, _: &[Scored], _: bool) -> String {
        "Ocelli's own: the rate is chosen on a fifth of train, never on test".into()
    }

    fn score(&self, task: &Task<'_>) -> Result<Vec<Scored>, EvalError> {
        Ok(vec![self.number(task)])
    }
}

impl LinearHonest {
    /// Computes the score on `task.test`.
    fn number(&self, task: &Task<'_>) -> Scored {
        let columns = task.train.layout().last(1);
        let train = task.train.columns(columns.clone());
        let test = task.test.columns(columns);
        let (fit, held_out) = hold_out(&train, HELD_OUT, task.seed);
        let tried = self.fit(&fit, &held_out, &self.rates, task);
        let accuracies: Vec<f64> = tried.iter().map(Predictions::accuracy).collect();
        // The last rate among equals: `max_by` returns the last maximum.
        let best = (0..accuracies.len()).max_by(|a, b| accuracies[*a].total_cmp(&accuracies[*b]));
        let rate = self.rates[best.unwrap_or_default()];
        let classified = self.fit(&train, &test, &[rate], task).remove(0);
        let held_out: Vec<_> = self.rates.iter().zip(accuracies).collect();
        Scored {
            metric: "linear_honest".into(),
            outcome: Outcome::Predictions(classified),
            details: json!({ "rate": rate, "held_out": held_out }),
            counts: None,
        }
    }

    /// Fits a head for each of `rates` on `train`; returns their predictions on `test`.
    fn fit(&self, train: &FeatureSet, test: &FeatureSet, rates: &[f64], task: &Task<'_>) -> Vec<Predictions> {
        let scaling = Standardization::new(train);
        let descent = HeadTraining { momentum: 0.9, init_std: 0.0, seed: task.seed };
        let all = 0..train.width();
        let mut heads = Heads::new(std::slice::from_ref(&all), rates, task.n_classes, descent);
        let n_steps = self.epochs * train.len().div_ceil(self.batch.max(1));
        let mut step = 0;
        let mut batches = BatchReader::new(train, Some(&scaling));
        for epoch in 0..self.epochs {
            batches.epoch(task.seed, epoch, self.batch.max(1), |rows, labels| {
                let done = step as f32 / n_steps as f32;
                heads.step(rows, labels, cosine(done));
                step += 1;
            });
        }
        classified(&mut heads, rates.len(), test, Some(&scaling), task.n_classes)
    }
}

#[cfg(test)]
mod tests {
    use augment::ViewRng;

    use super::*;
    use pipeline::NoProgress;

    /// Returns three linearly separable classes with a scale and shift that a probe can learn only
    /// after standardization.
    fn classes(n: usize, seed: u64) -> FeatureSet {
        let mut rng = ViewRng::from_words([seed, 0, 0, 0]);
        let mut rows = Vec::new();
        for i in 0..n {
            for c in 0..3 {
                let mean = if c == i % 3 { 6.0 } else { 0.0 };
                rows.push(1e3 + 1e-2 * (rng.normal() + mean));
            }
        }
        FeatureSet::from_rows(3, rows, (0..n as u32).map(|i| i % 3).collect())
    }

    fn accuracy(train: &FeatureSet, test: &FeatureSet) -> f64 {
        let task =
            Task { train, test, n_classes: 3, seed: 0, views: None, sets: None, progress: &NoProgress };
        LinearHonest::default().number(&task).outcome.value()
    }

    #[test]
    fn separable_classes_are_learned_and_random_labels_are_not() {
        let train = classes(600, 1);
        let test = classes(300, 2);
        assert!(accuracy(&train, &test) > 97.0);
        // With random training labels, the probe stays near chance on the true labels.
        let mut shuffled = train;
        let mut rng = ViewRng::from_words([9, 0, 0, 0]);
        shuffled.labels.iter_mut().for_each(|label| *label = rng.below(3));
        let accuracy = accuracy(&shuffled, &test);
        assert!(accuracy < 70.0, "{accuracy}");
    }
}
