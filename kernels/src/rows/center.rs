//! The nearest of several centers.
//!
//! ```text
//! cell_i = argmin_j |x_i - c_j|² = argmax_j x_i · c_j - |c_j|² / 2      x [N, D]   c [K, D]
//! ```
//!
//! Products are computed in blocks of rows and tiles of centers. Blocks begin at multiples of their
//! length, counted from the first of all rows, so that distances are bit-identical for any number
//! of threads and any range of rows.

use std::ops::Range;

use multiversion::multiversion;
use rayon::prelude::*;

use super::{LANES, Rows, squared_length};
use crate::ops::gemm::{Mat, gemm};

/// Number of rows of a block.
const BLOCK_ROWS: usize = 512;

/// Number of centers of a tile, whose products with a block fit into a core's cache.
const TILE_CENTERS: usize = 512;

/// The nearest center of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NearestCenter {
    /// Index of the center.
    pub cell: u32,
    /// Squared distance to the center; infinite before any center has been compared.
    pub distance: f32,
}

impl NearestCenter {
    /// The value before any center has been compared.
    pub const NONE: Self = Self { cell: u32::MAX, distance: f32::INFINITY };

    /// Number of rows that are compared at once. Results of ranges that begin at multiples of it
    /// are bit-identical to those of all rows.
    pub const BLOCK_ROWS: usize = BLOCK_ROWS;
}

/// Compares rows `range` with `centers`, `[K, D]`, which are numbered from `first_cell` on, and
/// stores each center that is nearer than the one in `nearest`. Of several centers at equal
/// distance, the one with the lowest index is nearest. Entries of rows that are not finite remain
/// unchanged.
///
/// # Panics
/// If `range` does not begin at a multiple of [`NearestCenter::BLOCK_ROWS`], or lengths do not fit.
pub fn find_nearest_centers(
    rows: &dyn Rows,
    range: Range<usize>,
    centers: &[f32],
    first_cell: u32,
    nearest: &mut [NearestCenter],
) {
    let d = rows.width();
    assert!(range.start.is_multiple_of(BLOCK_ROWS) && range.len() == nearest.len(), "whole blocks");
    assert!(d > 0 && centers.len().is_multiple_of(d), "centers have the width of rows");
    let half_squares: Vec<f32> = centers.chunks_exact(d).map(|center| squared_length(center) / 2.0).collect();
    let blocks = nearest.par_chunks_mut(BLOCK_ROWS).enumerate();
    blocks.for_each_init(Scratch::default, |scratch, (index, nearest)| {
        let start = range.start + index * BLOCK_ROWS;
        scratch.compare(rows, start, centers, &half_squares, first_cell, nearest);
    });
}

/// Buffers of a thread.
#[derive(Default)]
struct Scratch {
    rows: Vec<f32>,
    products: Vec<f32>,
}

impl Scratch {
    fn compare(
        &mut self,
        rows: &dyn Rows,
        start: usize,
        centers: &[f32],
        half_squares: &[f32],
        first_cell: u32,
        nearest: &mut [NearestCenter],
    ) {
        let n = nearest.len();
        let d = rows.width();
        self.rows.resize(n * d, 0.0);
        rows.copy(start..start + n, &mut self.rows);
        let mut best = vec![(f32::NEG_INFINITY, 0u32); n];
        for (tile, half_squares) in half_squares.chunks(TILE_CENTERS).enumerate() {
            let first = tile * TILE_CENTERS;
            let k = half_squares.len();
            let centers = &centers[first * d..(first + k) * d];
            self.products.resize(n * k, 0.0);
            let a = Mat::rows(&self.rows, d);
            let b = Mat::rows(centers, d).t();
            gemm([n, d, k], 1.0, a, b, 0.0, &mut self.products, k);
            update_best(&self.products, half_squares, first as u32, &mut best);
        }
        for ((nearest, (score, center)), row) in nearest.iter_mut().zip(best).zip(self.rows.chunks_exact(d)) {
            // Distances within the rounding error of zero are set to zero.
            let squares = squared_length(row);
            let distance = squares - 2.0 * score;
            let distance = if distance < 4.0 * f32::EPSILON * squares { 0.0 } else { distance };
            if distance < nearest.distance {
                *nearest = NearestCenter { cell: first_cell + center, distance };
            }
        }
    }
}

/// Replaces `best` of each row of `products`, `[n, k]`, by the largest difference of a product and
/// the center's half squared length, if that is larger, with its column counted from `first`.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn update_best(products: &[f32], half_squares: &[f32], first: u32, best: &mut [(f32, u32)]) {
    let k = half_squares.len();
    let aligned_len = k / LANES * LANES;
    for (products, best) in products.chunks_exact(k).zip(best) {
        let mut values = [f32::NEG_INFINITY; LANES];
        let mut columns = [0u32; LANES];
        let chunks = products.chunks_exact(LANES).zip(half_squares.chunks_exact(LANES));
        for (start, (products, half_squares)) in (0..).step_by(LANES).zip(chunks) {
            for lane in 0..LANES {
                let value = products[lane] - half_squares[lane];
                let is_larger = value > values[lane];
                values[lane] = if is_larger { value } else { values[lane] };
                columns[lane] = if is_larger { start } else { columns[lane] };
            }
        }
        for lane in 0..LANES {
            offer(best, values[lane], first + columns[lane] + lane as u32);
        }
        for column in aligned_len..k {
            offer(best, products[column] - half_squares[column], first + column as u32);
        }
    }
}

/// Replaces `best` by the candidate, if its value is larger, or equal with a lower column.
#[inline(always)]
fn offer(best: &mut (f32, u32), value: f32, column: u32) {
    if value > best.0 || (value == best.0 && value > f32::NEG_INFINITY && column < best.1) {
        *best = (value, column);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct Matrix {
        width: usize,
        values: Vec<f32>,
    }

    impl Rows for Matrix {
        fn len(&self) -> usize {
            self.values.len() / self.width
        }

        fn width(&self) -> usize {
            self.width
        }

        fn copy(&self, range: Range<usize>, out: &mut [f32]) {
            out.copy_from_slice(&self.values[range.start * self.width..range.end * self.width]);
        }
    }

    fn matrix(n: usize, width: usize, seed: usize) -> Matrix {
        let mut values = Vec::with_capacity(n * width);
        for i in 0..n * width {
            values.push(((i + seed) * 2_654_435_761 % 1000) as f32 / 500.0 - 1.0);
        }
        Matrix { width, values }
    }

    fn squared_distance(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum()
    }

    fn find(rows: &Matrix, range: Range<usize>, centers: &Matrix) -> Vec<NearestCenter> {
        let mut nearest = vec![NearestCenter::NONE; range.len()];
        find_nearest_centers(rows, range, &centers.values, 0, &mut nearest);
        nearest
    }

    proptest! {
        /// Compares with a loop over all distances in f64, up to rounding.
        #[test]
        fn the_nearest_center_is_found(n in 1usize..700, k in 1usize..1100, d in 1usize..40) {
            let rows = matrix(n, d, 1);
            let centers = matrix(k, d, 77);
            let nearest = find(&rows, 0..n, &centers);
            for (row, nearest) in rows.values.chunks_exact(d).zip(&nearest).step_by(37) {
                let distances: Vec<f64> =
                    centers.values.chunks_exact(d).map(|center| squared_distance(row, center)).collect();
                let smallest = distances.iter().copied().fold(f64::INFINITY, f64::min);
                prop_assert!((f64::from(nearest.distance) - smallest).abs() < 1e-4);
                prop_assert!(distances[nearest.cell as usize] - smallest < 1e-4);
            }
        }
    }

    /// Centers in two calls, and rows in two parts.
    #[test]
    fn partial_searches_are_bit_identical_to_one_search() {
        let rows = matrix(1100, 24, 3);
        let centers = matrix(700, 24, 5);
        let expected = find(&rows, 0..1100, &centers);
        let mut parts = find(&rows, 0..512, &centers);
        parts.extend(find(&rows, 512..1100, &centers));
        assert_eq!(expected, parts);
        let mut nearest = vec![NearestCenter::NONE; 1100];
        find_nearest_centers(&rows, 0..1100, &centers.values[..512 * 24], 0, &mut nearest);
        find_nearest_centers(&rows, 0..1100, &centers.values[512 * 24..], 512, &mut nearest);
        assert_eq!(expected, nearest);
    }

    #[test]
    fn ties_go_to_the_lower_number_and_nan_rows_have_no_center() {
        let rows = Matrix { width: 2, values: vec![1.0, 0.0, f32::NAN, 0.0] };
        let centers = Matrix { width: 2, values: [[0.0, 1.0], [1.0, 0.5], [1.0, 0.5]].repeat(9).concat() };
        let nearest = find(&rows, 0..2, &centers);
        assert_eq!(nearest[0], NearestCenter { cell: 1, distance: 0.25 });
        assert_eq!(nearest[1], NearestCenter::NONE);
    }
}
