//! Products whose first matrix lies in bf16 runs anywhere in memory, such as the windows of an
//! image: it is neither copied nor packed.
//!
//! ```text
//! out[i, :] = Σ_r run(i, r) · b[r·L..(r + 1)·L, :] + start        run(i, r) [L]   b [R·L, n]   out [m, n]
//! ```
//!
//! L is even, so that the pairs that one instruction multiplies lie side by side in memory.

use half::bf16;
use rayon::prelude::*;

use super::buffers::COLUMN_PANELS;
use super::tile::{ROWS, Runs, Tile, VECTORS, multiply_runs};
use super::{Block, CHUNK_ROWS, Mat, SMALL, Start, Sums};
use crate::ops::number::Number;

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

/// Computes the product; rows of `out` are `out_stride` apart. `fill` gives the runs of the row
/// that it is called with, each with its number, to the function that it is given; a run that it
/// leaves out is `missing`. A large product runs on the threads of the current rayon pool.
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
    let n_threads = if m * k * n < SMALL { 1 } else { rayon::current_num_threads() };
    let chunk_rows = CHUNK_ROWS.min(m.div_ceil(n_threads)).next_multiple_of(ROWS);
    let out = &mut out[..(m - 1) * out_stride + n];
    let mut columns = COLUMN_PANELS.take();
    for block in Block::of_columns(sums, 0..k) {
        block.pack_columns(b, &mut columns, n_threads);
        let chunk = |(i, out): (usize, &mut [O])| {
            let rows = i * chunk_rows..m.min((i + 1) * chunk_rows);
            // By tile and run; rows beyond the last are computed and not used.
            let mut runs: Vec<Runs<'a>> = vec![[missing; ROWS]; rows.len().div_ceil(ROWS) * n_runs];
            for (r, row) in rows.clone().enumerate() {
                fill(row, &mut |number, run| runs[r / ROWS * n_runs + number][r % ROWS] = &run[..len]);
            }
            let mut tile = Tile::default();
            for (columns, of_panel) in columns.chunks(VECTORS * block.n_pairs()).zip(block.panels()) {
                for (t, runs) in runs.chunks_exact(n_runs).enumerate() {
                    multiply_runs(runs, columns, columns.len() / block.n_pairs(), &mut tile);
                    let rows = t * ROWS..rows.len();
                    sums.finish_tile(&tile, rows, of_panel.clone(), out, out_stride);
                }
            }
        };
        match n_threads {
            1 => out.chunks_mut(chunk_rows * out_stride).enumerate().for_each(chunk),
            _ => out.par_chunks_mut(chunk_rows * out_stride).enumerate().for_each(chunk),
        }
    }
    COLUMN_PANELS.set(columns);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::product::product_into;

    /// Runs have the bits of the rows that they make up, over more than one chunk of rows and panel
    /// of columns; a run that is left out is the one that is missing.
    #[test]
    fn runs_equal_rows() {
        let sizes = RunSizes { m: CHUNK_ROWS + 3, n_runs: 3, len: 6, n: 67 };
        let k = sizes.n_runs * sizes.len;
        let number = |i: usize| bf16::nearest((i as f32 * 0.7).sin());
        let (a, b): (Vec<bf16>, Vec<bf16>) =
            ((0..sizes.m * k).map(number).collect(), (0..k * sizes.n).map(|i| number(i + 3)).collect());
        let zeros = vec![bf16::ZERO; sizes.len];
        let is_left_out = |row: usize, run: usize| (row + run).is_multiple_of(5);
        let rows: Vec<bf16> = a
            .chunks(sizes.len)
            .enumerate()
            .flat_map(|(i, run)| if is_left_out(i / 3, i % 3) { zeros.clone() } else { run.to_vec() })
            .collect();
        let start: Vec<f32> = (0..sizes.n).map(|i| i as f32).collect();
        for start in [Start::Zero, Start::Row(&start), Start::Output] {
            let mut out = [vec![7.0f32; sizes.m * 70], vec![7.0f32; sizes.m * 70]];
            let [of_runs, of_rows] = &mut out;
            let b = Mat::rows(&b, sizes.n);
            product_of_runs(
                sizes,
                |row: usize, put: &mut dyn FnMut(usize, _)| {
                    for run in (0..sizes.n_runs).filter(|run| !is_left_out(row, *run)) {
                        put(run, &a[row * k + run * sizes.len..]);
                    }
                },
                &zeros,
                b,
                start,
                of_runs,
                70,
            );
            product_into([sizes.m, k, sizes.n], 1.0, Mat::rows(&rows, k), b, start, of_rows, 70);
            assert!(of_runs == of_rows);
        }
    }
}
