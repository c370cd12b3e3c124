//! Weighted nearest-neighbor classification (Wu et al. 2018; the protocol of DINO).
//!
//! ```text
//! s_i = x · x_i over L2-normalized rows; the k largest vote for their class with exp(s_i / T)
//! ```

use rayon::prelude::*;

use crate::features::FeatureSet;

/// Numbers of neighbors that are scored.
pub(crate) const NEIGHBORS: [usize; 4] = [10, 20, 100, 200];

/// Temperature of the votes.
pub(crate) const TEMPERATURE: f32 = 0.07;

/// Accuracy in percent for each of [`NEIGHBORS`].
#[derive(Debug, Clone, PartialEq)]
pub struct KnnScores(pub Vec<(usize, f64)>);

impl KnnScores {
    /// Accuracy with `k` neighbors.
    pub fn at(&self, k: usize) -> Option<f64> {
        self.0.iter().find(|(n, _)| *n == k).map(|(_, accuracy)| *accuracy)
    }

    /// The headline number: 20 neighbors, which DINO found to work best.
    pub fn headline(&self) -> f64 {
        self.at(20).unwrap_or_default()
    }
}

/// The `k` rows of `train` most similar to each row of `test`, best first; both normalized.
pub(crate) fn neighbors(train: &FeatureSet, test: &FeatureSet, k: usize) -> Vec<Vec<(usize, f32)>> {
    let search = |row: usize| {
        let query = test.row(row);
        let mut scored: Vec<(usize, f32)> = (0..train.len()).map(|i| (i, dot(query, train.row(i)))).collect();
        let k = k.min(scored.len());
        // Ties go to the lower number, so that the result is one.
        let better = |a: &(usize, f32), b: &(usize, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if k < scored.len() {
            scored.select_nth_unstable_by(k, better);
            scored.truncate(k);
        }
        scored.sort_by(better);
        scored
    };
    (0..test.len()).into_par_iter().map(search).collect()
}

/// Scores `test` by its neighbors in `train`.
pub(crate) fn score(train: &FeatureSet, test: &FeatureSet) -> KnnScores {
    let (train, test) = (train.normalized(), test.normalized());
    let n_classes = train.n_classes().max(test.n_classes());
    let found = neighbors(&train, &test, NEIGHBORS[NEIGHBORS.len() - 1]);
    let accuracy = |k: usize| {
        let correct = found
            .par_iter()
            .enumerate()
            .filter(|(row, near)| vote(near, k, &train.labels, n_classes) == test.labels[*row])
            .count();
        (k, 100.0 * correct as f64 / test.len() as f64)
    };
    KnnScores(NEIGHBORS.into_iter().map(accuracy).collect())
}

fn vote(near: &[(usize, f32)], k: usize, labels: &[u32], n_classes: usize) -> u32 {
    let mut votes = vec![0.0f32; n_classes];
    for (i, similarity) in near.iter().take(k) {
        votes[labels[*i] as usize] += (similarity / TEMPERATURE).exp();
    }
    let best = votes.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
    best.map_or(0, |(class, _)| class as u32)
}

/// Sixteen running sums, an order that vector instructions can follow.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (a16, b16) = (a.chunks_exact(16), b.chunks_exact(16));
    let rest: f32 = a16.remainder().iter().zip(b16.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a16.zip(b16) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use pipeline::SampleId;

    fn set(rows: &[([f32; 2], u32)]) -> FeatureSet {
        FeatureSet {
            width: 2,
            rows: rows.iter().flat_map(|(row, _)| *row).collect(),
            labels: rows.iter().map(|(_, label)| *label).collect(),
            ids: (0..rows.len() as u64).map(SampleId).collect(),
            n_bad: 0,
        }
    }

    #[test]
    fn near_votes_weigh_more_than_many_far_ones() {
        let train = set(&[([1.0, 0.05], 0), ([0.0, 1.0], 1), ([0.1, 1.0], 1), ([-1.0, 0.2], 1)]);
        let test = set(&[([2.0, 0.0], 0), ([0.0, 3.0], 1)]);
        assert!(score(&train, &test).0.iter().all(|(_, accuracy)| *accuracy == 100.0));
    }

    #[test]
    fn neighbors_come_best_first() {
        let train = set(&[([0.0, 1.0], 0), ([1.0, 0.0], 0), ([0.8, 0.6], 0)]);
        let found = neighbors(&train, &set(&[([1.0, 0.0], 0)]), 2);
        let order: Vec<usize> = found[0].iter().map(|(i, _)| *i).collect();
        assert_eq!(order, [1, 2]);
    }

    /// A wrong class on every near neighbor scores zero: the score can fail.
    #[test]
    fn wrong_labels_score_zero() {
        let train = set(&[([1.0, 0.0], 0), ([0.0, 1.0], 1)]);
        let test = set(&[([1.0, 0.0], 1), ([0.0, 1.0], 0)]);
        assert_eq!(score(&train, &test).headline(), 0.0);
    }
}
