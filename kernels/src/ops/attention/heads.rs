//! Sizes of a sequence, and where its heads are in memory.

use std::sync::{Mutex, PoisonError};

use crate::ops::gemm::Mat;
use crate::ops::number::{Number, convert};

/// Longest sequences that are short: the scores of a head, 324 KiB, fit the L2 cache beside what
/// the products read and pack.
const MAX_TOKENS: usize = 288;

/// Tokens of which [`transpose`] reads a channel at once: the lanes of a vector.
const LINES: usize = 16;

/// Returns whether the weights of sequences of `n_tokens` tokens are kept for the backward pass on
/// CPUs. Else only one log-sum-exp for each token and head is.
pub fn keeps_weights(n_tokens: usize) -> bool {
    n_tokens <= MAX_TOKENS
}

/// Sizes of a sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// N.
    pub(super) n_tokens: usize,
    /// H.
    pub(super) n_heads: usize,
    /// D_h.
    pub(super) d_head: usize,
}

impl Sizes {
    /// Returns D, the width of queries, keys or values.
    pub(super) fn d(&self) -> usize {
        self.n_heads * self.d_head
    }

    /// Returns what scores are multiplied by.
    pub(super) fn scale(&self) -> f32 {
        (self.d_head as f32).powf(-0.5)
    }

    /// Returns whether the sequence is short.
    pub(super) fn is_whole(&self) -> bool {
        keeps_weights(self.n_tokens)
    }

    /// Returns the number of weights that are kept for the backward pass.
    pub(super) fn n_weights(&self) -> usize {
        if self.is_whole() { self.n_heads * self.n_tokens * self.n_tokens } else { 0 }
    }

    /// Returns the number of log-sum-exps that are kept for the backward pass.
    pub(super) fn n_log_sums(&self) -> usize {
        if self.is_whole() { 0 } else { self.n_heads * self.n_tokens }
    }

    /// Returns Q, K or V (`part` 0, 1, 2) of one head, `[N, D_h]`, in the rows `[N, 3·D]` of a
    /// sequence.
    pub(super) fn head<'a, T>(&self, qkv: &'a [T], part: usize, head: usize) -> Mat<'a, T> {
        Mat::rows(&qkv[part * self.d() + head * self.d_head..], 3 * self.d())
    }
}

/// Returns `mat` without its first `n` rows.
pub(super) fn skip_rows<T>(mat: Mat<'_, T>, n: usize) -> Mat<'_, T> {
    Mat { data: &mat.data[n * mat.row_stride..], ..mat }
}

/// Sets `out` to the first `n_rows` rows of `mat`, `[n_rows, n_columns]`. Rows of `mat` are
/// contiguous.
pub(super) fn copy_rows<T: Number>(mat: Mat<'_, T>, n_rows: usize, n_columns: usize, out: &mut Vec<T>) {
    out.clear();
    for row in 0..n_rows {
        out.extend_from_slice(&mat.data[row * mat.row_stride..][..n_columns]);
    }
}

/// Sets `out` to the transpose of the first `n_rows` rows of `mat`, `[n_columns, n_rows]`. Rows of
/// `mat` are contiguous.
pub(super) fn transpose<T: Number>(mat: Mat<'_, T>, n_rows: usize, n_columns: usize, out: &mut Vec<T>) {
    out.resize(n_columns * n_rows, T::default());
    for first in (0..n_rows).step_by(LINES) {
        let end = n_rows.min(first + LINES);
        let rows = &mat.data[first * mat.row_stride..];
        for (column, line) in out.chunks_exact_mut(n_rows).enumerate() {
            for (number, row) in line[first..end].iter_mut().zip(rows[column..].chunks(mat.row_stride)) {
                *number = row[0];
            }
        }
    }
}

/// Rows of tokens, to which threads write the heads that they have computed.
pub(super) struct Rows<'a, T> {
    rows: Mutex<&'a mut [T]>,
    /// Numbers of a row.
    width: usize,
}

impl<'a, T: Number> Rows<'a, T> {
    pub(super) fn new(rows: &'a mut [T], width: usize) -> Self {
        Self { rows: Mutex::new(rows), width }
    }

    /// Writes `values` of `[n, d_head]`, rounded, to the rows from `row` on and the columns from
    /// `column` on.
    pub(super) fn write(&self, row: usize, column: usize, values: &[f32], d_head: usize) {
        // A thread that panics has written numbers or has not; either way its panic is passed on.
        let mut all_rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let rows = all_rows[row * self.width + column..].chunks_mut(self.width);
        for (row, values) in rows.zip(values.chunks_exact(d_head)) {
            convert(values, &mut row[..d_head]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_copied_and_transposed() {
        let data: Vec<f32> = (0..37 * 7).map(|i| i as f32).collect();
        let mat = Mat::rows(&data[2..], 7);
        let mut copied = vec![0.5; 3];
        let mut transposed = vec![0.5; 999];
        copy_rows(mat, 36, 4, &mut copied);
        transpose(mat, 36, 4, &mut transposed);
        assert_eq!([copied.len(), transposed.len()], [36 * 4; 2]);
        for row in 0..36 {
            for column in 0..4 {
                let expected = (2 + row * 7 + column) as f32;
                assert_eq!(copied[row * 4 + column], expected);
                assert_eq!(transposed[column * 36 + row], expected);
            }
        }
    }

    #[test]
    fn heads_are_written_between_one_another() {
        let mut numbers = [0.0f32; 3 * 4];
        let rows = Rows::new(&mut numbers[..], 4);
        rows.write(1, 2, &[1.0, 2.0, 3.0, 4.0], 2);
        rows.write(0, 1, &[5.0, 6.0], 2);
        assert_eq!(numbers[..4], [0.0, 5.0, 6.0, 0.0]);
        assert_eq!(numbers[4..8], [0.0, 0.0, 1.0, 2.0]);
        assert_eq!(numbers[8..], [0.0, 0.0, 3.0, 4.0]);
    }
}
