//! Weighted nearest-neighbor classification (Wu et al. 2018; the protocol of DINO and DINOv2).
//!
//! ```text
//! s_i = x · x_i over rows of unit length; the k largest vote for their class with exp(s_i / T)
//! ```
//!
//! If images have several classes, the score of a class is its share of the votes, and the number
//! is the mean average precision (as in DINOv3's evaluation).

use std::ops::Range;
use std::sync::Once;

use kernels::rows::{Rows, nearest_rows};
use pipeline::words::counted;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::task::{Scored, Sets, Task};
use super::{Classes, Needs, Rules, as_published};
use crate::EvalError;
use crate::features::set::FeatureSet;
use crate::statistics::outcome::Outcome;
use crate::statistics::ranked::Ranked;
use crate::statistics::{Predictions, argmax};

/// The protocol's settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Knn {
    /// Numbers of neighbors; each gives a score.
    pub k: Vec<usize>,
    /// Temperature of the votes, T.
    pub temperature: f64,
    /// Searches neighbors in the test set itself, excluding the image itself.
    #[serde(default)]
    pub leave_one_out: bool,
}

impl Default for Knn {
    /// Returns DINO's settings.
    fn default() -> Self {
        Self { k: vec![10, 20, 100, 200], temperature: 0.07, leave_one_out: false }
    }
}

impl Rules for Knn {
    fn needs(&self) -> Needs {
        Needs { classes: Classes::Several, is_cheap: true, ..Needs::VECTORS }
    }

    fn in_words(&self, numbers: &[Scored], is_published: bool) -> String {
        if self.leave_one_out {
            return "weighted as DINO's, leave-one-out among the test images themselves".into();
        }
        if numbers.iter().any(|scored| scored.outcome.measure() == "mAP") {
            let as_theirs = as_published("DINOv3's", false, is_published);
            format!("{as_theirs}, mean average precision over several classes")
        } else {
            as_published("DINO and DINOv2", true, is_published)
        }
    }

    fn score(&self, task: &Task<'_>) -> Result<Vec<Scored>, EvalError> {
        Ok(self.numbers(task))
    }
}

impl Knn {
    /// Computes a number for each `k`.
    fn numbers(&self, task: &Task<'_>) -> Vec<Scored> {
        let columns = task.test.layout().last(1);
        let test = task.test.columns(columns.clone());
        let train = if self.leave_one_out { test.clone() } else { task.train.columns(columns) };
        let usable = self.usable(train.len());
        let several = task.sets.filter(|sets| sets.train.is_multi_label() || sets.test.is_multi_label());
        let outcomes: Vec<(usize, Outcome)> = match several {
            Some(sets) => usable.rank(sets, &train, &test, task.n_classes),
            None => {
                let classified = usable.classify(&train, &test, task.n_classes);
                classified
                    .into_iter()
                    .map(|(k, predictions)| (k, Outcome::Predictions(predictions)))
                    .collect()
            }
        };
        let prefix = if self.leave_one_out { "knn_loo" } else { "knn" };
        outcomes
            .into_iter()
            .map(|(k, outcome)| Scored {
                metric: format!("{prefix}_{k}"),
                outcome,
                details: json!({ "k": k, "temperature": self.temperature }),
                counts: None,
            })
            .collect()
    }

    /// Returns the protocol with only the numbers of neighbors that `n_train` images suffice for,
    /// and warns about the others. With fewer images than any of them, all are neighbors.
    fn usable(&self, n_train: usize) -> Self {
        let n_neighbors = if self.leave_one_out { n_train.saturating_sub(1) } else { n_train };
        let (mut k, left_out): (Vec<usize>, Vec<usize>) = self.k.iter().partition(|k| **k <= n_neighbors);
        if left_out.is_empty() {
            return self.clone();
        }
        if k.is_empty() {
            k.push(n_neighbors.max(1));
        }
        // A run scores the same images again and again.
        static WARNED: Once = Once::new();
        WARNED.call_once(|| {
            tracing::warn!(
                "knn: only {} can be neighbors: left out: k = {}; scored: k = {}",
                counted(n_neighbors as u64, "image"),
                comma_separated(&left_out),
                comma_separated(&k)
            );
        });
        Self { k, ..self.clone() }
    }

    /// Ranks the classes of `test` by the votes of `train` for each `k`, if images have several
    /// classes.
    fn rank(
        &self,
        sets: &Sets<'_>,
        train: &FeatureSet,
        test: &FeatureSet,
        n_classes: usize,
    ) -> Vec<(usize, Outcome)> {
        let max_k = self.k.iter().copied().max().unwrap_or_default();
        let nearest = neighbors(train, test, max_k, self.leave_one_out);
        let voters = if self.leave_one_out { sets.test } else { sets.train };
        let labels: Vec<Vec<u32>> = (0..train.len()).map(|row| voters.labels(train.image(row))).collect();
        let truths: Vec<Vec<u32>> = (0..test.len()).map(|row| sets.test.labels(test.image(row))).collect();
        let mut outcomes = Vec::with_capacity(self.k.len());
        for k in &self.k {
            let scores: Vec<f32> = nearest
                .par_iter()
                .flat_map_iter(|near| self.vote_shares(near, *k, &labels, n_classes))
                .collect();
            outcomes.push((*k, Outcome::Ranked(Ranked::new(&scores, n_classes, &truths))));
        }
        outcomes
    }

    /// Returns the share of each class in the votes of the `k` first of `near`, given all classes
    /// of each row.
    fn vote_shares(
        &self,
        near: &[(u32, f32)],
        k: usize,
        labels: &[Vec<u32>],
        n_classes: usize,
    ) -> impl Iterator<Item = f32> + use<> {
        let top = near.first().map_or(0.0, |(_, similarity)| f64::from(*similarity));
        let mut votes = vec![0.0f64; n_classes];
        let mut sum = 0.0;
        for (row, similarity) in near.iter().take(k) {
            let vote = ((f64::from(*similarity) - top) / self.temperature).exp();
            sum += vote;
            for class in &labels[*row as usize] {
                votes[*class as usize] += vote;
            }
        }
        votes.into_iter().map(move |vote| (vote / f64::max(sum, f64::MIN_POSITIVE)) as f32)
    }

    /// Classifies `test` by the votes of `train` for each `k`.
    pub(crate) fn classify(
        &self,
        train: &FeatureSet,
        test: &FeatureSet,
        n_classes: usize,
    ) -> Vec<(usize, Predictions)> {
        let max_k = self.k.iter().copied().max().unwrap_or_default();
        let nearest = neighbors(train, test, max_k, self.leave_one_out);
        let mut classified = Vec::with_capacity(self.k.len());
        for k in &self.k {
            let predicted =
                nearest.par_iter().map(|near| self.vote(near, *k, &train.labels, n_classes)).collect();
            classified.push((*k, Predictions::new(predicted, &test.labels, n_classes)));
        }
        classified
    }

    fn vote(&self, near: &[(u32, f32)], k: usize, labels: &[u32], n_classes: usize) -> u32 {
        let mut votes = vec![0.0f64; n_classes];
        // Similarities relative to the nearest neighbor: no vote overflows, and the ranking is the
        // same.
        let top = near.first().map_or(0.0, |(_, similarity)| f64::from(*similarity));
        for (row, similarity) in near.iter().take(k) {
            votes[labels[*row as usize] as usize] +=
                ((f64::from(*similarity) - top) / self.temperature).exp();
        }
        argmax(&votes)
    }
}

fn comma_separated(numbers: &[usize]) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Returns the `k` rows of `train` most similar to each row of `test`, best first, with their
/// cosine similarities. Ties go to the lower index. With `leave_one_out`, both sets must be the
/// same, and no row is its own neighbor.
pub fn neighbors(
    train: &FeatureSet,
    test: &FeatureSet,
    k: usize,
    leave_one_out: bool,
) -> Vec<Vec<(u32, f32)>> {
    nearest_rows(&UnitRows(train), &UnitRows(test), k, leave_one_out)
}

/// Rows of a set, scaled to unit length.
struct UnitRows<'a>(&'a FeatureSet);

impl Rows for UnitRows<'_> {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn width(&self) -> usize {
        self.0.width()
    }

    fn copy(&self, range: Range<usize>, out: &mut [f32]) {
        self.0.copy_normalized(range, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn set(rows: &[([f32; 2], u32)]) -> FeatureSet {
        let values = rows.iter().flat_map(|(row, _)| *row).collect();
        FeatureSet::from_rows(2, values, rows.iter().map(|(_, label)| *label).collect())
    }

    fn accuracies(train: &FeatureSet, test: &FeatureSet) -> Vec<f64> {
        let scored = Knn::default().classify(train, test, 2);
        scored.iter().map(|(_, classified)| classified.accuracy()).collect()
    }

    #[test]
    fn a_near_neighbor_outweighs_several_distant_ones() {
        let train = set(&[([1.0, 0.05], 0), ([0.0, 1.0], 1), ([0.1, 1.0], 1), ([-1.0, 0.2], 1)]);
        let test = set(&[([2.0, 0.0], 0), ([0.0, 3.0], 1)]);
        assert_eq!(accuracies(&train, &test), [100.0; 4]);
    }

    #[test]
    fn neighbors_are_sorted_by_similarity() {
        let train = set(&[([0.0, 1.0], 0), ([1.0, 0.0], 0), ([0.8, 0.6], 0), ([2.0, 0.0], 0)]);
        let nearest = neighbors(&train, &set(&[([1.0, 0.0], 0)]), 3, false);
        let order: Vec<u32> = nearest[0].iter().map(|(i, _)| *i).collect();
        assert_eq!(order, [1, 3, 2]);
    }

    /// At a low temperature the nearest neighbor decides, and no vote overflows.
    #[test]
    fn low_temperature_selects_the_nearest_neighbor() {
        let train = set(&[([0.0, 1.0], 0), ([0.3, 1.0], 0), ([1.0, 0.01], 1), ([0.9, 0.3], 0)]);
        let knn = Knn { k: vec![4], temperature: 1e-3, leave_one_out: false };
        let scored = knn.classify(&train, &set(&[([1.0, 0.0], 1)]), 2);
        assert_eq!(scored[0].1.accuracy(), 100.0);
    }

    /// A wrong class on every nearest neighbor scores zero.
    #[test]
    fn wrong_labels_score_zero() {
        let train = set(&[([1.0, 0.0], 0), ([0.0, 1.0], 1)]);
        let test = set(&[([1.0, 0.0], 1), ([0.0, 1.0], 0)]);
        assert_eq!(accuracies(&train, &test), [0.0; 4]);
    }

    /// Returns a deterministic pseudo-random value.
    fn value(i: usize) -> f32 {
        ((i * 2_654_435_761 % 1000) as f32 / 500.0 - 1.0) + 1e-3
    }

    proptest! {
        #[test]
        fn blockwise_search_equals_exhaustive_search(n in 1usize..2300, k in 1usize..12,
            leave_one_out: bool) {
            let d = 3;
            let rows: Vec<f32> = (0..n * d).map(value).collect();
            let train = FeatureSet::from_rows(d, rows, vec![0; n]);
            let queries: Vec<usize> = (0..n).step_by(191).collect();
            let test = if leave_one_out { train.clone() } else { train.select(queries.iter().copied()) };
            let nearest = neighbors(&train, &test, k, leave_one_out);
            for (position, query) in queries.iter().enumerate() {
                let near = &nearest[if leave_one_out { *query } else { position }];
                let mut unit = vec![0.0; n * d];
                train.copy_normalized(0..n, &mut unit);
                let mut all: Vec<(u32, f32)> = Vec::with_capacity(n);
                for i in 0..n {
                    if leave_one_out && i == *query {
                        continue;
                    }
                    let cosine = (0..d).map(|c| unit[i * d + c] * unit[query * d + c]).sum::<f32>();
                    all.push((i as u32, cosine));
                }
                all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
                all.truncate(k);
                prop_assert_eq!(near.len(), all.len());
                for (a, b) in near.iter().zip(&all) {
                    prop_assert!((a.1 - b.1).abs() < 1e-5, "{:?} {:?}", near, all);
                }
            }
        }
    }
}
