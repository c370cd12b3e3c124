//! The linear probe: softmax regression on frozen features, a grid of learning rates at once.
//!
//! ```text
//! x̂ = (x - mean) / std over train;  logits = W x̂ + b, one (W, b) a learning rate
//! SGD with momentum 0.9 and no weight decay on mini-batches, cosine to zero
//! the rate is chosen on every fifth sample of train, which is held out; the number is on test
//! ```

use augment::ViewRng;
use rayon::prelude::*;

use crate::features::FeatureSet;

/// The grid of learning rates.
pub(crate) const RATES: [f32; 7] = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0];

const EPOCHS: usize = 30;
const BATCH: usize = 128;
const MOMENTUM: f32 = 0.9;

/// Result of a probe.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearScore {
    /// Accuracy on test in percent.
    pub accuracy: f64,
    /// The chosen learning rate.
    pub rate: f32,
    /// Accuracy of each rate on the held-out part of train.
    pub held_out: Vec<(f32, f64)>,
}

/// Trains on `train`, reports on `test`. `seed` orders the mini-batches.
pub(crate) fn score(train: &FeatureSet, test: &FeatureSet, seed: u64) -> LinearScore {
    let n_classes = train.n_classes().max(test.n_classes());
    let scaling = Scaling::of(train);
    let (train, test) = (scaling.apply(train), scaling.apply(test));
    let fit = train.select(|i| i % 5 != 0);
    let held = train.select(|i| i % 5 == 0);
    let heads: Vec<(Head, f64)> = RATES
        .par_iter()
        .map(|rate| {
            let head = Head::train(&fit, n_classes, *rate, seed);
            let accuracy = head.accuracy(&held);
            (head, accuracy)
        })
        .collect();
    let best = (0..RATES.len()).max_by(|a, b| heads[*a].1.total_cmp(&heads[*b].1)).unwrap_or_default();
    LinearScore {
        accuracy: heads[best].0.accuracy(&test),
        rate: RATES[best],
        held_out: RATES.into_iter().zip(heads.iter().map(|(_, accuracy)| *accuracy)).collect(),
    }
}

/// Mean and inverse deviation of each channel.
struct Scaling {
    mean: Vec<f32>,
    inverse: Vec<f32>,
}

impl Scaling {
    fn of(set: &FeatureSet) -> Self {
        let n = set.len().max(1) as f64;
        let mut sums = vec![(0.0f64, 0.0f64); set.width];
        for row in set.rows.chunks_exact(set.width) {
            for (sum, value) in sums.iter_mut().zip(row) {
                let value = f64::from(*value);
                *sum = (sum.0 + value, sum.1 + value * value);
            }
        }
        let mean: Vec<f64> = sums.iter().map(|sum| sum.0 / n).collect();
        let inverse = sums
            .iter()
            .zip(&mean)
            // A channel without variance says nothing; its deviation is rounding.
            .map(|(sum, mean)| 1.0 / (sum.1 / n - mean * mean).max(1e-12).sqrt().max(1e-4))
            .map(|v| v as f32)
            .collect();
        Self { mean: mean.into_iter().map(|v| v as f32).collect(), inverse }
    }

    fn apply(&self, set: &FeatureSet) -> FeatureSet {
        let mut out = set.clone();
        for row in out.rows.chunks_exact_mut(set.width) {
            for ((value, mean), inverse) in row.iter_mut().zip(&self.mean).zip(&self.inverse) {
                *value = (*value - mean) * inverse;
            }
        }
        out
    }
}

/// One softmax regression.
struct Head {
    n_classes: usize,
    width: usize,
    /// `[classes, width]`
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl Head {
    fn train(set: &FeatureSet, n_classes: usize, rate: f32, seed: u64) -> Self {
        let width = set.width;
        let mut head =
            Self { n_classes, width, weight: vec![0.0; n_classes * width], bias: vec![0.0; n_classes] };
        let mut velocity = vec![0.0f32; head.weight.len() + n_classes];
        let mut gradient = vec![0.0f32; velocity.len()];
        let mut order: Vec<usize> = (0..set.len()).collect();
        let n_steps = EPOCHS * set.len().div_ceil(BATCH);
        let mut step = 0;
        for epoch in 0..EPOCHS {
            let mut rng = ViewRng::from_words([seed, SHUFFLE_DOMAIN, epoch as u64, 0]);
            rng.shuffle(&mut order);
            for batch in order.chunks(BATCH) {
                gradient.fill(0.0);
                for i in batch {
                    head.accumulate(set.row(*i), set.labels[*i] as usize, &mut gradient);
                }
                let done = step as f32 / n_steps as f32;
                let scaled = 0.5 * rate * (1.0 + (std::f32::consts::PI * done).cos());
                head.descend(&gradient, &mut velocity, scaled, 1.0 / batch.len() as f32);
                step += 1;
            }
        }
        head
    }

    fn logits(&self, row: &[f32]) -> Vec<f32> {
        self.weight
            .chunks_exact(self.width)
            .zip(&self.bias)
            .map(|(weight, bias)| bias + weight.iter().zip(row).map(|(w, x)| w * x).sum::<f32>())
            .collect()
    }

    /// Adds the gradient of the cross-entropy of one row.
    fn accumulate(&self, row: &[f32], label: usize, gradient: &mut [f32]) {
        let mut errors = self.logits(row);
        let max = errors.iter().copied().fold(f32::MIN, f32::max);
        errors.iter_mut().for_each(|v| *v = (*v - max).exp());
        let sum: f32 = errors.iter().sum();
        errors.iter_mut().for_each(|v| *v /= sum);
        errors[label] -= 1.0;
        let (weights, biases) = gradient.split_at_mut(self.weight.len());
        for (class, error) in errors.into_iter().enumerate() {
            biases[class] += error;
            for (g, x) in weights[class * self.width..].iter_mut().zip(row) {
                *g += error * x;
            }
        }
    }

    fn descend(&mut self, gradient: &[f32], velocity: &mut [f32], rate: f32, mean: f32) {
        let params = self.weight.iter_mut().chain(&mut self.bias);
        for ((param, gradient), velocity) in params.zip(gradient).zip(velocity) {
            *velocity = MOMENTUM * *velocity + gradient * mean;
            *param -= rate * *velocity;
        }
    }

    fn accuracy(&self, set: &FeatureSet) -> f64 {
        let correct =
            (0..set.len()).filter(|i| self.class_of(set.row(*i)) == set.labels[*i] as usize).count();
        100.0 * correct as f64 / set.len().max(1) as f64
    }

    fn class_of(&self, row: &[f32]) -> usize {
        let logits = self.logits(row);
        (0..self.n_classes).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap_or_default()
    }
}

/// Keeps the order of mini-batches apart from all other streams.
const SHUFFLE_DOMAIN: u64 = 0x7072_6f62_6500_0000;

#[cfg(test)]
mod tests {
    use super::*;
    use pipeline::SampleId;

    /// Three classes, separable by a line each, under a scale and shift that only a probe that
    /// standardises can cope with.
    fn classes(n: usize, seed: u64) -> FeatureSet {
        let mut rng = ViewRng::from_words([seed, 0, 0, 0]);
        let mut set = FeatureSet { width: 3, ..FeatureSet::default() };
        for i in 0..n {
            let label = i % 3;
            let row = (0..3).map(|c| 1e3 + 1e-2 * (rng.normal() + if c == label { 6.0 } else { 0.0 }));
            set.rows.extend(row);
            set.labels.push(label as u32);
            set.ids.push(SampleId(i as u64));
        }
        set
    }

    #[test]
    fn it_learns_what_is_separable_and_not_what_is_noise() {
        let (train, test) = (classes(600, 1), classes(300, 2));
        assert!(score(&train, &test, 0).accuracy > 97.0);
        // Labels that say nothing of the rows leave a probe at chance, on true labels too.
        let mut shuffled = train;
        let mut rng = ViewRng::from_words([9, 0, 0, 0]);
        shuffled.labels.iter_mut().for_each(|label| *label = rng.below(3));
        let accuracy = score(&shuffled, &test, 0).accuracy;
        assert!(accuracy < 70.0, "{accuracy}");
    }
}
