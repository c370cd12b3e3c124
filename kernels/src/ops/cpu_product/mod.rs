//! Products of f32 or bf16 matrices.
//!
//! ```text
//! out = scale · a · b + start      a [m, k]   b [k, n]   out [m, n]   start zero, a row [n], or out
//! ```
//!
//! If all types are f32, the `gemm` crate computes the product ([`super::gemm`]), which it cannot
//! do for bf16. Else both matrices are rounded to bf16, so that products of two numbers are exact
//! in f32, and sums are f32. Where the CPU has AVX512-BF16 (AMD from Zen 4 on, Intel's Cooper Lake
//! and from Sapphire Rapids on), `vdpbf16ps` multiplies twice as many numbers as an f32
//! multiply-add, which is used elsewhere and makes bf16 slower than f32 there. Both add in one
//! order: bits differ only for numbers below 1.2e-38, which `vdpbf16ps` treats as zero. Matrices
//! are packed into panels ([`pack`]), whose products are tiles ([`tile`]); rows that are bf16
//! already are read without packing ([`runs`]).

mod buffers;
mod pack;
mod runs;
mod tile;

pub use buffers::ProductLimits;
pub(super) use pack::{pack_columns, pack_pair};
pub(super) use runs::{RunSizes, product_of_runs};
#[cfg(target_arch = "x86_64")]
pub(super) use tile::x86;
pub(super) use tile::{LaneSums, Lanes, N_LANES, plus_pair};

use std::ops::Range;

use burn_tensor::DType;
use half::bf16;
use multiversion::multiversion;
use rayon::prelude::*;

use super::gemm::{self, Mat, gemm};
use super::number::{Number, nearest};
use super::tally::{self, Product};
use super::threads::product_threads;
use buffers::{CHUNK_ROWS, COLUMN_PANELS, DEPTH, PANEL_BYTES, ROW_PANELS, resize_to_overwrite};
use pack::pack_rows;
use tile::{COLUMNS, ROWS, Tile, VECTORS, multiply};

/// Longest rows in bf16 of a matrix that are multiplied without packing: the panel of columns by
/// which they are multiplied stays in the L2 cache.
const MAX_RUN: usize = 4096;

/// Multiplications below which a product is computed by the calling thread alone.
const SMALL: usize = 1 << 20;

/// The start value that a product is added to.
#[derive(Debug, Clone, Copy)]
pub enum Start<'a> {
    /// Zeros.
    Zero,
    /// One row, which is added to every row of the output.
    Row(&'a [f32]),
    /// The previous content of the output.
    Output,
}

/// Returns `a · b`, `[m, n]`, with `row` added to every row.
///
/// # Panics
/// Under the conditions of [`product_into`].
pub(super) fn product<A: Number, B: Number, O: Number>(
    [m, k, n]: [usize; 3],
    a: Mat<'_, A>,
    b: Mat<'_, B>,
    row: Option<&[f32]>,
) -> Vec<O> {
    match (as_f32(a), as_f32(b), O::DTYPE, row) {
        (Some(a), Some(b), DType::F32, None) => nearest(gemm::product([m, k, n], 1.0, a, b)),
        // `out` starts as the row, so that it need not be zeroed first.
        (Some(a), Some(b), DType::F32, Some(row)) => {
            let mut out = row.repeat(m);
            gemm([m, k, n], 1.0, a, b, 1.0, &mut out, n);
            nearest(out)
        }
        _ => {
            let mut out = vec![O::default(); m * n];
            product_into([m, k, n], 1.0, a, b, row.map_or(Start::Zero, Start::Row), &mut out, n);
            out
        }
    }
}

/// Computes `out = scale · a · b + start`; rows of `out` are `out_stride` apart. A large product
/// runs on the threads of the current rayon pool.
///
/// # Panics
/// If a matrix does not lie inside its slice, or, unless all types are f32, has neither contiguous
/// rows nor columns.
pub fn product_into<A: Number, B: Number, O: Number>(
    [m, k, n]: [usize; 3],
    scale: f32,
    a: Mat<'_, A>,
    b: Mat<'_, B>,
    start: Start<'_>,
    out: &mut [O],
    out_stride: usize,
) {
    if m == 0 || n == 0 {
        return;
    }
    assert!(n <= out_stride, "rows of the output do not overlap");
    let out = &mut out[..(m - 1) * out_stride + n];
    match (as_f32(a), as_f32(b), O::DTYPE) {
        (Some(a), Some(b), DType::F32) => {
            let out = bytemuck::cast_slice_mut(out);
            let keep = match start {
                Start::Zero => 0.0,
                Start::Output => 1.0,
                Start::Row(start) => {
                    out.chunks_mut(out_stride).for_each(|row| row[..n].copy_from_slice(start));
                    1.0
                }
            };
            gemm([m, k, n], scale, a, b, keep, out, out_stride);
        }
        _ => {
            assert!(has_unit_stride(a) && has_unit_stride(b));
            let sums = Sums { mkn: [m, k, n], scale, start };
            let has_bf16_rows = A::DTYPE == DType::BF16 && a.col_stride == 1;
            if has_bf16_rows && k.is_multiple_of(2) && k <= MAX_RUN && scale == 1.0 {
                let rows = bytemuck::cast_slice::<A, bf16>(a.data);
                let sizes = RunSizes { m, n_runs: 1, len: k, n };
                return product_of_runs(
                    sizes,
                    |row: usize, put: &mut dyn FnMut(usize, _)| put(0, &rows[row * a.row_stride..]),
                    &rows[..k],
                    b,
                    start,
                    out,
                    out_stride,
                );
            }
            sums.note(a, b);
            if k > DEPTH && O::DTYPE != DType::F32 {
                sums.compute_wide(a, b, out, out_stride)
            } else {
                sums.compute(a, b, out, out_stride)
            }
        }
    }
}

/// Returns true if rows or columns of `mat` are contiguous.
fn has_unit_stride<T>(mat: Mat<'_, T>) -> bool {
    mat.row_stride == 1 || mat.col_stride == 1
}

/// Calls `f` with the index of each chunk of `len` elements of `values`, and the chunk: in the
/// current rayon pool if there are several threads.
fn for_each_chunk<T: Send>(
    values: &mut [T],
    len: usize,
    n_threads: usize,
    f: impl Fn(usize, &mut [T]) + Send + Sync,
) {
    if n_threads == 1 {
        values.chunks_mut(len).enumerate().for_each(|(i, chunk)| f(i, chunk));
    } else {
        values.par_chunks_mut(len).enumerate().for_each(|(i, chunk)| f(i, chunk));
    }
}

/// Returns `mat` unchanged if it is f32.
fn as_f32<T: Number>(mat: Mat<'_, T>) -> Option<Mat<'_, f32>> {
    let Mat { data, row_stride, col_stride } = mat;
    (T::DTYPE == DType::F32).then(|| Mat { data: bytemuck::cast_slice(data), row_stride, col_stride })
}

/// A product in bf16.
#[derive(Clone, Copy)]
struct Sums<'a> {
    mkn: [usize; 3],
    scale: f32,
    start: Start<'a>,
}

impl Sums<'_> {
    fn note<A, B>(&self, a: Mat<'_, A>, b: Mat<'_, B>) {
        #[cfg(feature = "testing")]
        gemm::count::add(self.mkn.iter().map(|side| *side as f64).product::<f64>() * 2.0);
        tally::record(|| Product {
            mkn: self.mkn,
            transposed: [a.col_stride > 1, b.col_stride > 1],
            adds: !matches!(self.start, Start::Zero),
            bf16: true,
            n_threads: product_threads(),
        });
    }

    /// Computes sums over several blocks of k in f32, and rounds them once at the end.
    fn compute_wide<A: Number, B: Number, O: Number>(
        self,
        a: Mat<'_, A>,
        b: Mat<'_, B>,
        out: &mut [O],
        out_stride: usize,
    ) {
        let [_, _, n] = self.mkn;
        let mut sums = Vec::new();
        out.chunks(out_stride).for_each(|row| sums.extend(row[..n].iter().map(|value| value.wide())));
        self.compute(a, b, &mut sums, n);
        for (row, sums) in out.chunks_mut(out_stride).zip(sums.chunks(n)) {
            finish(sums, 1.0, Start::Zero, &mut row[..n]);
        }
    }

    /// Computes blocks of k one after another, and chunks of rows in parallel.
    fn compute<A: Number, B: Number, O: Number>(
        self,
        a: Mat<'_, A>,
        b: Mat<'_, B>,
        out: &mut [O],
        out_stride: usize,
    ) {
        let [m, k, n] = self.mkn;
        let n_threads = if m * k * n < SMALL { 1 } else { product_threads() };
        let chunk_rows = CHUNK_ROWS.min(m.div_ceil(n_threads)).next_multiple_of(ROWS);
        let mut columns = COLUMN_PANELS.take();
        for first in (0..k.max(1)).step_by(DEPTH) {
            let start = if first == 0 { self.start } else { Start::Output };
            for block in Block::split_columns(Sums { start, ..self }, first..k.min(first + DEPTH)) {
                block.pack_columns(b, &mut columns, n_threads);
                for_each_chunk(out, chunk_rows * out_stride, n_threads, |i, out| {
                    let rows = i * chunk_rows..m.min((i + 1) * chunk_rows);
                    block.compute_rows(a, rows, &columns, out, out_stride);
                });
            }
        }
        COLUMN_PANELS.set(columns);
    }

    /// Writes the sums of a tile to `rows` and `columns` of the result; rows of the tile beyond
    /// `rows` are not used.
    fn finish_tile<O: Number>(
        &self,
        tile: &Tile,
        rows: Range<usize>,
        columns: Range<usize>,
        out: &mut [O],
        out_stride: usize,
    ) {
        let start = match self.start {
            Start::Row(start) => Start::Row(&start[columns.clone()]),
            start => start,
        };
        for (row, sums) in rows.zip(tile) {
            let out = &mut out[row * out_stride..][columns.clone()];
            finish(&sums.as_flattened()[..columns.len()], self.scale, start, out);
        }
    }
}

/// A block of k and of columns.
struct Block<'a> {
    sums: Sums<'a>,
    depth: Range<usize>,
    columns: Range<usize>,
}

impl<'a> Block<'a> {
    /// Returns the blocks of all columns, each of as many panels as are packed at once.
    fn split_columns(sums: Sums<'a>, depth: Range<usize>) -> impl Iterator<Item = Self> {
        let [_, _, n] = sums.mkn;
        let panel_bytes = n_pairs(&depth) * VECTORS * size_of::<Lanes>();
        let n_columns = (PANEL_BYTES / panel_bytes).max(1) * COLUMNS;
        (0..n).step_by(n_columns).map(move |first| Self {
            sums,
            depth: depth.clone(),
            columns: first..n.min(first + n_columns),
        })
    }

    fn n_pairs(&self) -> usize {
        n_pairs(&self.depth)
    }

    /// Returns the columns of each panel.
    fn panels(&self) -> impl Iterator<Item = Range<usize>> {
        let end = self.columns.end;
        self.columns.clone().step_by(COLUMNS).map(move |first| first..end.min(first + COLUMNS))
    }

    /// Packs the panels of the block's columns of `b`, each with the vectors of a tile.
    fn pack_columns<B: Number>(&self, b: Mat<'_, B>, columns: &mut Vec<Lanes>, n_threads: usize) {
        let Range { start, end } = self.columns;
        resize_to_overwrite(columns, (end - start).div_ceil(N_LANES) * self.n_pairs());
        for_each_chunk(columns, VECTORS * self.n_pairs(), n_threads, |i, panel| {
            let lines = start + i * COLUMNS..end.min(start + (i + 1) * COLUMNS);
            pack_columns(b.t(), lines, self.depth.clone(), panel);
        });
    }

    /// Computes `rows` of the block's columns, given their panels.
    fn compute_rows<A: Number, O: Number>(
        &self,
        a: Mat<'_, A>,
        rows: Range<usize>,
        columns: &[Lanes],
        out: &mut [O],
        out_stride: usize,
    ) {
        let n_pairs = self.n_pairs();
        let mut panels = ROW_PANELS.take();
        resize_to_overwrite(&mut panels, rows.len().div_ceil(ROWS) * n_pairs);
        pack_rows(a, rows.clone(), self.depth.clone(), &mut panels, n_pairs);
        let mut tile = Tile::default();
        for (columns, range) in columns.chunks(VECTORS * n_pairs).zip(self.panels()) {
            for (t, panel) in panels.chunks_exact(n_pairs).enumerate() {
                multiply(panel, columns, columns.len() / n_pairs, &mut tile);
                let rows = t * ROWS..rows.len();
                self.sums.finish_tile(&tile, rows, range.clone(), out, out_stride);
            }
        }
        ROW_PANELS.set(panels);
    }
}

/// Returns the number of pairs of a depth, at least one.
fn n_pairs(depth: &Range<usize>) -> usize {
    depth.len().div_ceil(2).max(1)
}

/// Computes `out = scale · sums + start`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn finish<O: Number>(sums: &[f32], scale: f32, start: Start<'_>, out: &mut [O]) {
    match start {
        Start::Zero => {
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = O::nearest(sum * scale);
            }
        }
        Start::Row(start) => {
            for ((out, sum), start) in out.iter_mut().zip(sums).zip(start) {
                *out = O::nearest(sum * scale + start);
            }
        }
        Start::Output => {
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = O::nearest(sum * scale + out.wide());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn numbers<T: Number>(n: usize, frequency: f32) -> Vec<T> {
        (0..n).map(|i| T::nearest((i as f32 * frequency).sin())).collect()
    }

    /// Returns a number rounded to bf16.
    fn rounded<T: Number>(value: T) -> f64 {
        f64::from(bf16::from_f32(value.wide()).to_f32())
    }

    /// Returns the largest distance to three loops in f64 over numbers rounded to bf16, whose
    /// products are exact, relative to the size of a sum of k products.
    fn distance<A: Number, B: Number, O: Number>(
        [m, k, n]: [usize; 3],
        a_transposed: bool,
        b_transposed: bool,
        start: Start<'_>,
        out_stride: usize,
    ) -> f64 {
        let a = numbers::<A>(m * k, 0.7);
        let b = numbers::<B>(k * n, 0.3);
        let left = if a_transposed { Mat::rows(&a, m).t() } else { Mat::rows(&a, k) };
        let right = if b_transposed { Mat::rows(&b, k).t() } else { Mat::rows(&b, n) };
        let mut out = vec![O::nearest(7.0); m * out_stride];
        product_into([m, k, n], 0.5, left, right, start, &mut out, out_stride);
        let mut worst: f64 = 0.0;
        for (i, row) in out.chunks(out_stride).enumerate() {
            for (j, value) in row[..n].iter().enumerate() {
                let mut sum = 0.0;
                for l in 0..k {
                    let a = a[i * left.row_stride + l * left.col_stride];
                    let b = b[l * right.row_stride + j * right.col_stride];
                    sum += rounded(a) * rounded(b);
                }
                let start = match start {
                    Start::Zero => 0.0,
                    Start::Row(row) => f64::from(row[j]),
                    Start::Output => 7.0,
                };
                let expected = 0.5 * sum + start;
                let unit = 1.0 + expected.abs() + (k as f64).sqrt();
                worst = worst.max((f64::from(value.wide()) - expected).abs() / unit);
            }
            assert!(row[n..].iter().all(|value| value.wide() == 7.0), "the rest of the output is unchanged");
        }
        worst
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn products_equal_three_loops(
            m in 1usize..14,
            k in 0usize..70,
            n in 1usize..150,
            a_transposed in any::<bool>(),
            b_transposed in any::<bool>(),
            start in 0usize..3,
        ) {
            let mkn = [m, k, n];
            let row = numbers::<f32>(n, 0.9);
            let start = [Start::Zero, Start::Row(&row), Start::Output][start];
            prop_assert!(distance::<bf16, bf16, f32>(mkn, a_transposed, b_transposed, start, n) < 1e-6);
            prop_assert!(distance::<bf16, f32, f32>(mkn, a_transposed, b_transposed, start, n + 5) < 1e-6);
            prop_assert!(distance::<f32, bf16, bf16>(mkn, a_transposed, b_transposed, start, n + 5) < 4e-3);
        }
    }

    /// Covers more than one block of k and more than one chunk of rows.
    #[test]
    fn large_products_equal_three_loops() {
        let mkn = [CHUNK_ROWS + 5, DEPTH + 37, 67];
        let row = numbers::<f32>(67, 0.9);
        for start in [Start::Zero, Start::Row(&row), Start::Output] {
            assert!(distance::<bf16, bf16, f32>(mkn, true, false, start, 70) < 1e-6);
            assert!(distance::<f32, bf16, bf16>(mkn, false, true, start, 70) < 4e-3);
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads() {
        let mkn = [CHUNK_ROWS + 5, DEPTH + 37, 67];
        let a = numbers::<bf16>(mkn[0] * mkn[1], 0.7);
        let b = numbers::<bf16>(mkn[1] * mkn[2], 0.3);
        let left = Mat::rows(&a, mkn[1]);
        let right = Mat::rows(&b, mkn[2]);
        let mut outputs = Vec::new();
        for n_threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().expect("a pool");
            outputs.push(pool.install(|| product::<_, _, f32>(mkn, left, right, None)));
        }
        assert!(outputs[0] == outputs[1]);
    }

    /// Columns beyond those that are packed at once have the bits of a product of their own.
    #[test]
    fn bits_do_not_depend_on_blocks_of_columns() {
        for k in [DEPTH + 2, MAX_RUN] {
            let m = 5;
            let n = PANEL_BYTES / (2 * DEPTH) + 3;
            let a = numbers::<bf16>(m * k, 0.7);
            let b = numbers::<bf16>(k * n, 0.3);
            for left in [Mat::rows(&a, k), Mat::rows(&a, m).t()] {
                let all_columns = product::<_, _, f32>([m, k, n], left, Mat::rows(&b, n), None);
                let first = n - 3;
                let right = Mat { data: &b[first..], row_stride: n, col_stride: 1 };
                let last_columns = product::<_, _, f32>([m, k, 3], left, right, None);
                for (row, last) in all_columns.chunks(n).zip(last_columns.chunks(3)) {
                    assert_eq!(&row[first..], last);
                }
            }
        }
    }
}
