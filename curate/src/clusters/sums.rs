//! Sums of the rows of each cluster that do not depend on their order.
//!
//! Every number is rounded to a multiple of `2^-s`, with `s` so large that no sum of all rows needs
//! more than the 53 bits of an f64: additions are exact. With a million rows of unit length `s` is
//! 32.

use std::ops::Range;

use kernels::rows::{NearestCenter, Rows};
use rayon::prelude::*;

/// Number of clusters whose sums a task adds to.
const CLUSTERS_PER_TASK: usize = 16;

/// Bits of an f64 sum that stay exact.
const EXACT_BITS: i32 = 52;

/// Sums and counts of the rows of each cluster.
pub(super) struct ClusterSums {
    /// Sums, `[K, D]`.
    pub(super) values: Vec<f64>,
    /// Number of rows of each cluster; f64 as sums are, to be added over ranks together.
    pub(super) counts: Vec<f64>,
    width: usize,
    /// Number that rounds to a multiple of the unit when it is added and subtracted.
    rounding: f64,
}

impl ClusterSums {
    /// Returns zeros for `n_clusters`, for sums of at most `n_rows` numbers of at most `largest`.
    pub(super) fn new(n_clusters: usize, width: usize, n_rows: usize, largest: f32) -> Self {
        let bits_of_rows = (usize::BITS - n_rows.leading_zeros()) as i32;
        let bits_of_numbers = f64::from(largest).max(f64::MIN_POSITIVE).log2().ceil() as i32;
        let unit_bits = EXACT_BITS - bits_of_rows - bits_of_numbers;
        Self {
            values: vec![0.0; n_clusters * width],
            counts: vec![0.0; n_clusters],
            width,
            rounding: 1.5 * 2f64.powi(EXACT_BITS - unit_bits),
        }
    }

    /// Adds rows `range`, each to the cluster of its nearest center. A row without one is left out.
    pub(super) fn add(&mut self, rows: &dyn Rows, range: Range<usize>, nearest: &[NearestCenter]) {
        let d = self.width;
        let rounding = self.rounding;
        let n_clusters = self.counts.len();
        let (starts, order) = by_cluster(nearest, n_clusters);
        let values = self.values.par_chunks_mut(CLUSTERS_PER_TASK * d);
        let counts = self.counts.par_chunks_mut(CLUSTERS_PER_TASK);
        values.zip(counts).enumerate().for_each_init(
            || vec![0.0f32; d],
            |row, (task, (values, counts))| {
                let first = task * CLUSTERS_PER_TASK;
                for (i, (sum, count)) in values.chunks_exact_mut(d).zip(counts).enumerate() {
                    let members = &order[starts[first + i]..starts[first + i + 1]];
                    *count += members.len() as f64;
                    for member in members {
                        let index = range.start + *member as usize;
                        rows.copy(index..index + 1, row);
                        for (sum, value) in sum.iter_mut().zip(&*row) {
                            *sum += (f64::from(*value) + rounding) - rounding;
                        }
                    }
                }
            },
        );
    }
}

/// Returns the numbers of the rows in the order of their clusters, and where each cluster starts,
/// `[K + 1]`.
pub(super) fn by_cluster(nearest: &[NearestCenter], n_clusters: usize) -> (Vec<usize>, Vec<u32>) {
    let cluster = |nearest: &NearestCenter| nearest.cell as usize;
    let mut starts = vec![0usize; n_clusters + 1];
    for number in nearest.iter().map(cluster).filter(|number| *number < n_clusters) {
        starts[number + 1] += 1;
    }
    for i in 0..n_clusters {
        starts[i + 1] += starts[i];
    }
    let mut next = starts.clone();
    let mut order = vec![0u32; starts[n_clusters]];
    for (row, number) in nearest.iter().map(cluster).enumerate().filter(|(_, number)| *number < n_clusters) {
        order[next[number]] = row as u32;
        next[number] += 1;
    }
    (starts, order)
}
