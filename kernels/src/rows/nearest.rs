//! The nearest neighbors of rows.
//!
//! Products are computed in blocks, `[queries, D] · [D, candidates]`, of which the largest are
//! kept: the full matrix is never in memory.

use std::ops::Range;

use rayon::prelude::*;

use super::{Rows, blocks};
use crate::ops::gemm::{Mat, gemm};

/// Number of queries per block. It is independent of the number of threads, so that products are
/// bit-identical for any number of threads, and large, so that the cost of copying candidates is
/// negligible. Products of ranges that begin at a multiple of it are bit-identical to those of all
/// rows.
pub const QUERY_BLOCK_ROWS: usize = 256;

/// Number of candidates per block, which fits into a core's cache. Products of ranges that begin at
/// a multiple of it are bit-identical to those of all rows.
pub const CANDIDATE_BLOCK_ROWS: usize = 1024;

/// Returns the `k` rows of `candidates` with the largest products with each row of `queries`, best
/// first, with these products, which are cosine similarities if rows have unit length. Ties go to
/// the lower index. With `excludes_itself`, row `i` is not among the neighbors of query `i`.
pub fn nearest_rows(
    candidates: &dyn Rows,
    queries: &dyn Rows,
    k: usize,
    excludes_itself: bool,
) -> Vec<Vec<(u32, f32)>> {
    let k = k.min(candidates.len());
    let query_blocks: Vec<Range<usize>> = blocks(0..queries.len(), QUERY_BLOCK_ROWS).collect();
    query_blocks
        .par_iter()
        .flat_map_iter(|range| search_block(candidates, queries, range.clone(), k, excludes_itself))
        .collect()
}

fn search_block(
    candidates: &dyn Rows,
    queries: &dyn Rows,
    range: Range<usize>,
    k: usize,
    excludes_itself: bool,
) -> Vec<Vec<(u32, f32)>> {
    let d = queries.width();
    let n_queries = range.len();
    let mut query_rows = vec![0.0; n_queries * d];
    queries.copy(range.clone(), &mut query_rows);
    let mut candidate_rows = vec![0.0; CANDIDATE_BLOCK_ROWS * d];
    let mut products = vec![0.0; n_queries * CANDIDATE_BLOCK_ROWS];
    let mut best: Vec<TopK> = range.clone().map(|_| TopK::new(k)).collect();
    for block in blocks(0..candidates.len(), CANDIDATE_BLOCK_ROWS) {
        let n = block.len();
        candidates.copy(block.clone(), &mut candidate_rows[..n * d]);
        let a = Mat::rows(&query_rows, d);
        let b = Mat::rows(&candidate_rows, d).t();
        gemm([n_queries, d, n], 1.0, a, b, 0.0, &mut products, n);
        for ((query, best), products) in range.clone().zip(&mut best).zip(products.chunks_exact(n)) {
            for (candidate, product) in block.clone().zip(products) {
                if !(excludes_itself && candidate == query) {
                    best.offer(candidate as u32, *product);
                }
            }
        }
    }
    best.into_iter().map(TopK::into_sorted).collect()
}

/// Collector of the `k` best candidates, which is pruned whenever it holds 2 `k`.
struct TopK {
    k: usize,
    candidates: Vec<(u32, f32)>,
    /// Product that a candidate must exceed to be among the `k` best.
    threshold: f32,
}

impl TopK {
    fn new(k: usize) -> Self {
        Self { k, candidates: Vec::with_capacity(2 * k), threshold: f32::NEG_INFINITY }
    }

    #[inline(always)]
    fn offer(&mut self, row: u32, product: f32) {
        // Rows are offered in order, so that of equal products at the threshold the one with the
        // higher index is rejected. NaN compares as false and is never a neighbor.
        if product > self.threshold {
            // Minus zero becomes zero, so that `total_cmp` agrees with this comparison.
            self.candidates.push((row, product + 0.0));
            if self.candidates.len() == 2 * self.k.max(1) {
                self.keep_best();
            }
        }
    }

    fn keep_best(&mut self) {
        if self.candidates.len() > self.k {
            self.candidates.select_nth_unstable_by(self.k, compare_candidates);
            self.candidates.truncate(self.k);
            self.threshold =
                self.candidates.iter().map(|(_, product)| *product).fold(f32::INFINITY, f32::min);
        }
    }

    fn into_sorted(mut self) -> Vec<(u32, f32)> {
        self.keep_best();
        self.candidates.sort_unstable_by(compare_candidates);
        self.candidates
    }
}

/// Orders by descending product. Ties go to the lower index, so that the result is deterministic.
fn compare_candidates(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}
