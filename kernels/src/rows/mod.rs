//! Nearest-neighbor searches over rows of numbers, such as features of images. Rows are copied in
//! blocks, so that they need not fit into memory.

mod center;
mod nearest;

use std::ops::Range;

pub use center::{NearestCenter, find_nearest_centers};
pub use nearest::{CANDIDATE_BLOCK_ROWS, QUERY_BLOCK_ROWS, nearest_rows};

/// Rows of equal length, `[n, width]`.
pub trait Rows: Sync {
    /// Returns the number of rows.
    fn len(&self) -> usize;

    /// Returns whether there are no rows.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of columns.
    fn width(&self) -> usize;

    /// Copies rows `range` into `out`, `[range.len(), width]`.
    fn copy(&self, range: Range<usize>, out: &mut [f32]);
}

/// Scales a row to unit length; a row of zeros remains unchanged.
pub fn scale_to_unit_length(row: &mut [f32]) {
    let norm = squared_length(row).sqrt().max(1e-12);
    row.iter_mut().for_each(|v| *v /= norm);
}

/// Number of SIMD lanes: elements that are added or compared in parallel.
const LANES: usize = 16;

/// Returns the sum of squares, added in the same order on all machines.
fn squared_length(row: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let chunks = row.chunks_exact(LANES);
    let remainder: f32 = chunks.remainder().iter().map(|v| v * v).sum();
    for chunk in chunks {
        for (sum, v) in sums.iter_mut().zip(chunk) {
            *sum += v * v;
        }
    }
    sums.iter().sum::<f32>() + remainder
}

/// Divides `range` into blocks of `len` elements; the last one may be shorter.
fn blocks(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(len).map(move |start| start..end.min(start + len))
}
