//! Products whose first matrix consists of runs of bf16 numbers anywhere in memory, such as the
//! windows of an image: it is neither copied nor packed.
//!
//! ```text
//! out[i, :] = Σ_r run(i, r) · b[r·L..(r + 1)·L, :] + start     run(i, r) [L]   b [R·L, n]   out [m, n]
//! ```
//!
//! L is even, so that the two numbers of a pair, which one instruction multiplies, are neighbors in
//! memory.

use half::bf16;

use super::buffers::COLUMN_PANELS;
use super::tile::{ROWS, Runs, Tile, VECTORS, multiply_runs};
use super::{Block, CHUNK_ROWS, Mat, SMALL, Start, Sums, for_each_chunk};
use crate::ops::number::Number;
use crate::ops::threads::product_threads;

/// Sizes of a product of runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::ops) struct RunSizes {
    /// Rows, m.
    pub m: usize,
    /// Runs of a row, R.
    pub n_runs: usize,
    /// Numbers of a run, L, which is even.
    pub len: usize,
    /// Columns, n.
    pub n: usize,
}

/// Computes the product; rows of `out` are `out_stride` apart. `fill` is called with the number of
/// a row, and passes the index of each run of the row, and the run, to its second argument;
/// `missing` replaces runs that are not passed. A large product runs on the threads of the current
/// rayon pool.
///
/// # Panics
/// If a run is shorter than the sizes say, or the second matrix does not lie inside its slice.
pub(in crate::ops) fn product_of_runs<'a, B: Number, O: Number>(
    sizes: RunSizes,
    fill: impl Fn(usize, &mut dyn FnMut(usize, &'a [bf16])) + Sync,
    missing: &'a [bf16],
    b: Mat<'_, B>,
    start: Start<'_>,
    out: &mut [O],
    out_stride: usize,
) {
    let RunSizes { m, n_runs, len, n } = sizes;
    assert!(len.is_multiple_of(2) && n <= out_stride, "runs of pairs, and rows that do not overlap");
    if m == 0 || n == 0 {
        return;
    }
    let k = n_runs * len;
    let sums = Sums { mkn: [m, k, n], scale: 1.0, start };
    sums.note(Mat { data: missing, row_stride: k, col_stride: 1 }, b);
    let n_threads = if m * k * n < SMALL { 1 } else { product_threads() };
    let chunk_rows = CHUNK_ROWS.min(m.div_ceil(n_threads)).next_multiple_of(ROWS);
    let out = &mut out[..(m - 1) * out_stride + n];
    let mut columns = COLUMN_PANELS.take();
    for block in Block::split_columns(sums, 0..k) {
        block.pack_columns(b, &mut columns, n_threads);
        for_each_chunk(out, chunk_rows * out_stride, n_threads, |i, out| {
            let rows = i * chunk_rows..m.min((i + 1) * chunk_rows);
            // By tile and run; rows beyond the last are computed and not used.
            let mut runs: Vec<Runs<'a>> = vec![[missing; ROWS]; rows.len().div_ceil(ROWS) * n_runs];
            for (r, row) in rows.clone().enumerate() {
                fill(row, &mut |index, run| runs[r / ROWS * n_runs + index][r % ROWS] = &run[..len]);
            }
            let mut tile = Tile::default();
            for (columns, range) in columns.chunks(VECTORS * block.n_pairs()).zip(block.panels()) {
                for (t, runs) in runs.chunks_exact(n_runs).enumerate() {
                    multiply_runs(runs, columns, columns.len() / block.n_pairs(), &mut tile);
                    let rows = t * ROWS..rows.len();
                    sums.finish_tile(&tile, rows, range.clone(), out, out_stride);
                }
            }
        });
    }
    COLUMN_PANELS.set(columns);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::cpu_product::product_into;

    fn number(i: usize) -> bf16 {
        bf16::nearest((i as f32 * 0.7).sin())
    }

    /// Returns true if `fill` does not pass this run.
    fn is_missing(row: usize, run: usize) -> bool {
        (row + run).is_multiple_of(5)
    }

    /// The product of runs has the bits of the product of the rows that they form, over more than
    /// one chunk of rows and panel of columns.
    #[test]
    fn products_of_runs_equal_products_of_rows() {
        let sizes = RunSizes { m: CHUNK_ROWS + 3, n_runs: 3, len: 6, n: 67 };
        let k = sizes.n_runs * sizes.len;
        let a: Vec<bf16> = (0..sizes.m * k).map(number).collect();
        let b: Vec<bf16> = (0..k * sizes.n).map(|i| number(i + 3)).collect();
        let zeros = vec![bf16::ZERO; sizes.len];
        let mut rows: Vec<bf16> = a.clone();
        for (i, run) in rows.chunks_mut(sizes.len).enumerate() {
            if is_missing(i / 3, i % 3) {
                run.fill(bf16::ZERO);
            }
        }
        let start: Vec<f32> = (0..sizes.n).map(|i| i as f32).collect();
        for start in [Start::Zero, Start::Row(&start), Start::Output] {
            let mut product_of_all_runs = vec![7.0f32; sizes.m * 70];
            let mut product_of_rows = vec![7.0f32; sizes.m * 70];
            let b = Mat::rows(&b, sizes.n);
            product_of_runs(
                sizes,
                |row: usize, put: &mut dyn FnMut(usize, _)| {
                    for run in (0..sizes.n_runs).filter(|run| !is_missing(row, *run)) {
                        put(run, &a[row * k + run * sizes.len..]);
                    }
                },
                &zeros,
                b,
                start,
                &mut product_of_all_runs,
                70,
            );
            product_into([sizes.m, k, sizes.n], 1.0, Mat::rows(&rows, k), b, start, &mut product_of_rows, 70);
            assert!(product_of_all_runs == product_of_rows);
        }
    }
}
