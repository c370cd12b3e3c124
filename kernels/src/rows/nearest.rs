//! The nearest neighbors of rows.
//!
//! Products are computed in blocks, `[queries, D] · [D, candidates]`, keeping the largest: the full
//! matrix is never in memory.

use std::ops::Range;

use rayon::prelude::*;

use super::{Rows, blocks};
use crate::ops::gemm::{Mat, gemm};

/// Number of queries per block, whatever the number of threads, so that the bits of a product do
/// not depend on it; many, so that the cost of copying candidates is negligible. Products have the
/// same bits in parts that begin at a multiple of it.
pub const QUERY_BLOCK_ROWS: usize = 256;

/// Number of candidates per block, which stays in a core's cache. Products have the same bits in
/// parts that begin at a multiple of it.
pub const CANDIDATE_BLOCK_ROWS: usize = 1024;

/// Returns the `k` rows of `candidates` with the largest products with each row of `queries`, best
/// first, with these products: cosine similarities if rows have unit length. Ties go to the lower
/// index. With `excludes_itself`, row `i` is not among the neighbors of query `i`.
pub fn nearest_rows(
    candidates: &dyn Rows,
    queries: &dyn Rows,
    k: usize,
    excludes_itself: bool,
) -> Vec<Vec<(u32, f32)>> {
    let k = k.min(candidates.len());
    let all: Vec<Range<usize>> = blocks(0..queries.len(), QUERY_BLOCK_ROWS).collect();
    all.par_iter()
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
    best.into_iter().map(TopK::sorted).collect()
}

/// Collector of the `k` best candidates, pruned whenever it holds 2 `k`.
struct TopK {
    k: usize,
    found: Vec<(u32, f32)>,
    /// Product that a candidate must exceed to enter the `k` best.
    bar: f32,
}

impl TopK {
    fn new(k: usize) -> Self {
        Self { k, found: Vec::with_capacity(2 * k), bar: f32::NEG_INFINITY }
    }

    #[inline(always)]
    fn offer(&mut self, row: u32, product: f32) {
        // Rows are offered in order, so that a tie with the worst of the best loses by its higher
        // index. NaN compares as false and is never a neighbor.
        if product > self.bar {
            // Minus zero becomes zero, so that the order of products is that of this comparison.
            self.found.push((row, product + 0.0));
            if self.found.len() == 2 * self.k.max(1) {
                self.keep_best();
            }
        }
    }

    fn keep_best(&mut self) {
        if self.found.len() > self.k {
            self.found.select_nth_unstable_by(self.k, better);
            self.found.truncate(self.k);
            self.bar = self.found.iter().map(|(_, product)| *product).fold(f32::INFINITY, f32::min);
        }
    }

    fn sorted(mut self) -> Vec<(u32, f32)> {
        self.keep_best();
        self.found.sort_unstable_by(better);
        self.found
    }
}

/// Orders by descending product. Ties go to the lower index, so that the result is deterministic.
fn better(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}
