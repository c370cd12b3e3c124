//! Weighted sums of rows, from which resizing and blurring are made.
//!
//! ```text
//! out[y, ·] = Σ_t w[y, t] · in[first[y] + t, ·]
//! ```
//!
//! A pass along rows is the same on the transposed plane.

use multiversion::multiversion;

/// Weights of each output row.
#[derive(Debug, Default)]
pub(super) struct Taps {
    /// First input row, and range of the weights, by output row.
    rows: Vec<(usize, std::ops::Range<usize>)>,
    weights: Vec<f32>,
}

impl Taps {
    /// Removes all rows.
    pub(super) fn clear(&mut self) {
        self.rows.clear();
        self.weights.clear();
    }

    /// Adds an output row, which reads input rows from `first` on.
    pub(super) fn push(&mut self, first: usize, weights: impl IntoIterator<Item = f32>) {
        let start = self.weights.len();
        self.weights.extend(weights);
        self.rows.push((first, start..self.weights.len()));
    }

    /// Computes the output rows, of `width` values each, from `input`.
    pub(super) fn apply(&self, input: &[f32], width: usize, out: &mut Vec<f32>) {
        out.clear();
        out.resize(self.rows.len() * width, 0.0);
        for ((first, range), out) in self.rows.iter().zip(out.chunks_exact_mut(width)) {
            let weights = &self.weights[range.clone()];
            let rows = input[first * width..].chunks_exact(width);
            for (weight, row) in weights.iter().zip(rows) {
                add_weighted(out, *weight, row);
            }
        }
    }
}

/// Transposes a plane of rows of `width` values.
pub(super) fn transpose(plane: &[f32], width: usize, out: &mut Vec<f32>) {
    /// Side of the tiles that are transposed one after another, so that reads and writes stay in
    /// the cache.
    const TILE: usize = 16;
    let height = plane.len() / width;
    out.resize(plane.len(), 0.0);
    for top in (0..height).step_by(TILE) {
        for left in (0..width).step_by(TILE) {
            for y in top..(top + TILE).min(height) {
                for x in left..(left + TILE).min(width) {
                    out[x * height + y] = plane[y * width + x];
                }
            }
        }
    }
}

/// Adds `weight` times `row` to `out`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_weighted(out: &mut [f32], weight: f32, row: &[f32]) {
    for (out, value) in out.iter_mut().zip(row) {
        *out += weight * value;
    }
}
