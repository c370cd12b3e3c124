//! Rows for training: held out, in mini-batches, standardized.

use augment::ViewRng;

use super::heads::{Heads, Rows};
use crate::features::set::FeatureSet;
use crate::score::Classified;

/// Keeps the order of mini-batches apart from all other streams.
const SHUFFLE_DOMAIN: u64 = 0x7072_6f62_6500_0000;

/// Rows that are scored at a time.
const SCORED: usize = 1024;

/// Keeps the choice of held-out rows apart from all other streams.
const HOLD_OUT_DOMAIN: u64 = 0x686f_6c64_0000_0000;

/// A random one in `parts` of the rows of `set`, and the rest: (to fit on, held out).
pub(super) fn hold_out(set: &FeatureSet, parts: usize, seed: u64) -> (FeatureSet, FeatureSet) {
    let mut order: Vec<usize> = (0..set.len()).collect();
    ViewRng::from_words([seed, HOLD_OUT_DOMAIN, 0, 0]).shuffle(&mut order);
    let n_held_out = (set.len() / parts).max(1).min(set.len().saturating_sub(1));
    let (held_out, fit) = order.split_at(n_held_out);
    (set.select(fit.iter().copied()), set.select(held_out.iter().copied()))
}

/// The factor of a learning rate that falls to zero along half a cosine; `done` is the share of the run that is over.
pub(super) fn cosine(done: f32) -> f32 {
    0.5 * (1.0 + (std::f32::consts::PI * done).cos())
}

/// Rows gathered side by side, perhaps standardized.
pub(super) struct Gathered<'a> {
    set: &'a FeatureSet,
    scaling: Option<&'a Scaling>,
    rows: Vec<f32>,
    labels: Vec<u32>,
}

impl<'a> Gathered<'a> {
    /// Rows of `set`, through `scaling` if there is one.
    pub(super) fn new(set: &'a FeatureSet, scaling: Option<&'a Scaling>) -> Self {
        Self { set, scaling, rows: Vec::new(), labels: Vec::new() }
    }

    /// Calls `f` with each of the mini-batches of `epoch`: every row once, in an order that `seed` gives.
    pub(super) fn epoch(
        &mut self,
        seed: u64,
        epoch: usize,
        batch: usize,
        mut f: impl FnMut(Rows<'_>, &[u32]),
    ) {
        let mut order: Vec<u32> = (0..self.set.len() as u32).collect();
        ViewRng::from_words([seed, SHUFFLE_DOMAIN, epoch as u64, 0]).shuffle(&mut order);
        for numbers in order.chunks(batch) {
            self.gather(numbers.iter().map(|number| *number as usize));
            f(Rows { rows: &self.rows, width: self.set.width() }, &self.labels);
        }
    }

    /// Calls `f` with all rows in their order, block by block.
    pub(super) fn in_order(&mut self, mut f: impl FnMut(Rows<'_>)) {
        for start in (0..self.set.len()).step_by(SCORED) {
            self.gather(start..self.set.len().min(start + SCORED));
            f(Rows { rows: &self.rows, width: self.set.width() });
        }
    }

    fn gather(&mut self, numbers: impl Iterator<Item = usize>) {
        self.rows.clear();
        self.labels.clear();
        for number in numbers {
            let start = self.rows.len();
            self.rows.extend_from_slice(self.set.row(number));
            self.labels.push(self.set.labels[number]);
            if let Some(scaling) = self.scaling {
                scaling.apply(&mut self.rows[start..]);
            }
        }
    }
}

/// Mean and inverse deviation of each channel.
pub(super) struct Scaling {
    mean: Vec<f32>,
    inverse: Vec<f32>,
}

impl Scaling {
    /// Computes the moments of the rows of `set`.
    pub(super) fn of(set: &FeatureSet) -> Self {
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
            // A channel without variance says nothing; its deviation is rounding.
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

/// What each of `n_heads` heads makes of `test`.
pub(super) fn classified(
    heads: &mut Heads,
    n_heads: usize,
    test: &FeatureSet,
    scaling: Option<&Scaling>,
    n_classes: usize,
) -> Vec<Classified> {
    let mut predicted = vec![Vec::with_capacity(test.len()); n_heads];
    Gathered::new(test, scaling).in_order(|rows| {
        for (all, of_block) in predicted.iter_mut().zip(heads.predict(rows)) {
            all.extend(of_block);
        }
    });
    let of_head = |predicted| Classified::new(predicted, &test.labels, n_classes);
    predicted.into_iter().map(of_head).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Labels that repeat with any period are held out as all others.
    #[test]
    fn every_class_is_on_both_sides() {
        let labels: Vec<u32> = (0..200).map(|i| i % 10).collect();
        let set = FeatureSet::from_rows(1, labels.iter().map(|label| *label as f32).collect(), labels);
        let (fit, held_out) = hold_out(&set, 10, 0);
        assert_eq!((fit.len(), held_out.len()), (180, 20));
        let classes = |set: &FeatureSet| set.labels.iter().collect::<std::collections::BTreeSet<_>>().len();
        assert!(classes(&fit) == 10 && classes(&held_out) > 5, "{:?}", held_out.labels);
        assert!(
            (0..20).all(|i| held_out.row(i)[0] == held_out.labels[i] as f32),
            "labels go with their rows"
        );
        let one = set.select(std::iter::once(3));
        assert_eq!(hold_out(&one, 10, 0).0.len(), 1, "one row is fitted on");
    }
}
