//! Sums of the rows of each cluster that do not depend on their order.
//!
//! Every number is rounded to a multiple of `2^-s`, with the largest `s` such that no sum over all
//! rows needs more than the 53 bits of an f64: additions are exact. With a million rows of unit
//! length `s` is 32.

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
    /// Number of rows of each cluster, in f64, the type of sums over ranks.
    pub(super) counts: Vec<f64>,
    width: usize,
    /// Number that rounds to a multiple of the unit when it is added and subtracted.
    rounding: f64,
}

impl ClusterSums {
    /// Creates the sums of `n_clusters` clusters, of at most `n_rows` numbers with absolute values
    /// of at most `largest`.
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

    /// Adds rows `range`, each to the cluster of its nearest center. A row without a center is
    /// skipped.
    pub(super) fn add(&mut self, rows: &dyn Rows, range: Range<usize>, nearest: &[NearestCenter]) {
        let d = self.width;
        let rounding = self.rounding;
        let n_clusters = self.counts.len();
        let clusters = RowsByCluster::new(nearest, n_clusters);
        let values = self.values.par_chunks_mut(CLUSTERS_PER_TASK * d);
        let counts = self.counts.par_chunks_mut(CLUSTERS_PER_TASK);
        values.zip(counts).enumerate().for_each_init(
            || vec![0.0f32; d],
            |row, (task, (values, counts))| {
                let first = task * CLUSTERS_PER_TASK;
                for (i, (sum, count)) in values.chunks_exact_mut(d).zip(counts).enumerate() {
                    let members = clusters.rows_of(first + i);
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

/// Rows of each cluster.
pub(super) struct RowsByCluster {
    /// Position in `rows` of the first row of each cluster, and the number of all rows, `[K + 1]`.
    starts: Vec<usize>,
    /// Rows in their order, cluster by cluster.
    rows: Vec<u32>,
}

impl RowsByCluster {
    /// Sorts rows by the cluster of their nearest center. A row without a center is in none.
    pub(super) fn new(nearest: &[NearestCenter], n_clusters: usize) -> Self {
        let mut starts = vec![0usize; n_clusters + 1];
        for nearest in nearest {
            let cluster = nearest.cell as usize;
            if cluster < n_clusters {
                starts[cluster + 1] += 1;
            }
        }
        for i in 0..n_clusters {
            starts[i + 1] += starts[i];
        }
        let mut next = starts.clone();
        let mut rows = vec![0u32; starts[n_clusters]];
        for (row, nearest) in nearest.iter().enumerate() {
            let cluster = nearest.cell as usize;
            if cluster < n_clusters {
                rows[next[cluster]] = row as u32;
                next[cluster] += 1;
            }
        }
        Self { starts, rows }
    }

    /// Returns the rows of a cluster.
    pub(super) fn rows_of(&self, cluster: usize) -> &[u32] {
        &self.rows[self.starts[cluster]..self.starts[cluster + 1]]
    }
}
