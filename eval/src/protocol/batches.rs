//! Preparation of rows for training: held-out sets, mini-batches, standardization.

use augment::ViewRng;

use super::heads::{Heads, Rows};
use crate::features::set::FeatureSet;
use crate::statistics::Predictions;

/// RNG domain of the shuffles, distinct from all other streams.
const SHUFFLE_DOMAIN: u64 = 0x7072_6f62_6500_0000;

/// Number of rows scored at a time.
const SCORED: usize = 1024;

/// RNG domain of the choice of held-out rows, distinct from all other streams.
const HOLD_OUT_DOMAIN: u64 = 0x686f_6c64_0000_0000;

/// Splits the rows of `set` at random, holding out one in `parts`: (to fit on, held out).
pub(super) fn hold_out(set: &FeatureSet, parts: usize, seed: u64) -> (FeatureSet, FeatureSet) {
    let mut order: Vec<usize> = (0..set.len()).collect();
    ViewRng::from_words([seed, HOLD_OUT_DOMAIN, 0, 0]).shuffle(&mut order);
    let n_held_out = (set.len() / parts).max(1).min(set.len().saturating_sub(1));
    let (held_out, fit) = order.split_at(n_held_out);
    (set.select(fit.iter().copied()), set.select(held_out.iter().copied()))
}

/// Returns the factor of a learning rate with cosine decay to zero; `done` is the completed share
/// of the training.
pub(super) fn cosine(done: f32) -> f32 {
    0.5 * (1.0 + (std::f32::consts::PI * done).cos())
}

/// Reader of batches of contiguous rows, standardized if required.
pub(super) struct BatchReader<'a> {
    set: &'a FeatureSet,
    scaling: Option<&'a Standardization>,
    rows: Vec<f32>,
    labels: Vec<u32>,
}

impl<'a> BatchReader<'a> {
    /// Returns a reader of `set` that applies `scaling` if there is one.
    pub(super) fn new(set: &'a FeatureSet, scaling: Option<&'a Standardization>) -> Self {
        Self { set, scaling, rows: Vec::new(), labels: Vec::new() }
    }

    /// Calls `f` with each mini-batch of `epoch`: every row once, shuffled by `seed` and `epoch`.
    pub(super) fn epoch(
        &mut self,
        seed: u64,
        epoch: usize,
        batch: usize,
        mut f: impl FnMut(Rows<'_>, &[u32]),
    ) {
        let mut order: Vec<u32> = (0..self.set.len() as u32).collect();
        ViewRng::from_words([seed, SHUFFLE_DOMAIN, epoch as u64, 0]).shuffle(&mut order);
        for indices in order.chunks(batch) {
            self.gather(indices.iter().map(|i| *i as usize));
            f(Rows { rows: &self.rows, width: self.set.width() }, &self.labels);
        }
    }

    /// Calls `f` with all rows in order, block by block.
    pub(super) fn in_order(&mut self, mut f: impl FnMut(Rows<'_>)) {
        for start in (0..self.set.len()).step_by(SCORED) {
            self.gather(start..self.set.len().min(start + SCORED));
            f(Rows { rows: &self.rows, width: self.set.width() });
        }
    }

    fn gather(&mut self, indices: impl Iterator<Item = usize>) {
        self.rows.clear();
        self.labels.clear();
        for i in indices {
            let start = self.rows.len();
            self.rows.extend_from_slice(self.set.row(i));
            self.labels.push(self.set.labels[i]);
            if let Some(scaling) = self.scaling {
                scaling.apply(&mut self.rows[start..]);
            }
        }
    }
}

/// Mean and inverse standard deviation of each channel.
pub(super) struct Standardization {
    mean: Vec<f32>,
    inverse: Vec<f32>,
}

impl Standardization {
    /// Computes the statistics of the rows of `set`.
    pub(super) fn new(set: &FeatureSet) -> Self {
        let n = set.len().max(1) as f64;
        let mut sums = vec![(0.0f64, 0.0f64); set.width()];
        for i in 0..set.len() {
            for (sum, value) in sums.iter_mut().zip(set.row(i)) {
                let value = f64::from(*value);
                *sum = (sum.0 + value, sum.1 + value * value);
            }
        }
        let mean: Vec<f64> = sums.iter().map(|sum| sum.0 / n).collect();
        let inverse = sums
            .iter()
            .zip(&mean)
            // The deviation of a constant channel is rounding noise, which must not be amplified.
            .map(|(sum, mean)| 1.0 / (sum.1 / n - mean * mean).max(1e-12).sqrt().max(1e-4))
            .map(|v| v as f32)
            .collect();
        Self { mean: mean.into_iter().map(|v| v as f32).collect(), inverse }
    }

    fn apply(&self, row: &mut [f32]) {
        for ((value, mean), inverse) in row.iter_mut().zip(&self.mean).zip(&self.inverse) {
            *value = (*value - mean) * inverse;
        }
    }
}

/// Returns the predictions of each of `n_heads` heads on `test`.
pub(super) fn classified(
    heads: &mut Heads,
    n_heads: usize,
    test: &FeatureSet,
    scaling: Option<&Standardization>,
    n_classes: usize,
) -> Vec<Predictions> {
    let mut predicted = vec![Vec::with_capacity(test.len()); n_heads];
    BatchReader::new(test, scaling).in_order(|rows| {
        for (all, block) in predicted.iter_mut().zip(heads.predict(rows)) {
            all.extend(block);
        }
    });
    predicted.into_iter().map(|predicted| Predictions::new(predicted, &test.labels, n_classes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn n_distinct_labels(set: &FeatureSet) -> usize {
        set.labels.iter().collect::<std::collections::BTreeSet<_>>().len()
    }

    /// The random choice also works for labels that repeat periodically.
    #[test]
    fn held_out_rows_are_drawn_from_all_classes() {
        let labels: Vec<u32> = (0..200).map(|i| i % 10).collect();
        let set = FeatureSet::from_rows(1, labels.iter().map(|label| *label as f32).collect(), labels);
        let (fit, held_out) = hold_out(&set, 10, 0);
        assert_eq!((fit.len(), held_out.len()), (180, 20));
        assert_eq!(n_distinct_labels(&fit), 10);
        assert!(n_distinct_labels(&held_out) > 5, "{:?}", held_out.labels);
        assert!(
            (0..20).all(|i| held_out.row(i)[0] == held_out.labels[i] as f32),
            "labels go with their rows"
        );
        let one = set.select(std::iter::once(3));
        assert_eq!(hold_out(&one, 10, 0).0.len(), 1, "one row is fitted on");
    }
}
