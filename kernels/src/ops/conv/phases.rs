//! The input gradient of a convolution, computed by convolutions of the output gradient with a
//! stride of one.
//!
//! ```text
//! gx[s·i + r - p, c] = Σ_a,o g[i - a, o] · w[o, c, r + s·a]        a ≥ 0
//! ```
//!
//! on either axis, s the stride and p the padding: cells whose position plus p leaves the same
//! remainder r when divided by s are a phase. Their gradient depends on every s-th tap from r on,
//! in reverse order. A stride of one has one phase.
//!
//! No result is accumulated in memory, and each is rounded once.

use super::channels::Taps;
use super::geometry::{Geometry, Lattice};

/// The cells of a convolution's input whose positions have the same remainders, and the convolution
/// that computes their gradient.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Phase {
    /// Windows over the output gradient, one for each cell of the phase.
    pub geometry: Geometry,
    /// Taps of the weights, and their indices in these windows.
    pub taps: Taps,
    /// Row and column of the phase's first cell.
    first: [usize; 2],
}

impl Phase {
    /// Returns the phases of the convolution with windows `forward` that have cells and taps. The
    /// cells of other phases are covered by no window: their gradient is zero.
    pub(super) fn all(forward: &Geometry) -> Vec<Self> {
        let rows = Line::all(forward, 0);
        let columns = Line::all(forward, 1);
        let mut phases = Vec::with_capacity(rows.len() * columns.len());
        for row in &rows {
            for column in &columns {
                phases.push(Self::new(forward, row, column));
            }
        }
        phases
    }

    fn new(forward: &Geometry, rows: &Line, columns: &Line) -> Self {
        let geometry = Geometry {
            n_images: forward.n_images,
            input: forward.output,
            output: [rows.n_cells, columns.n_cells],
            kernel: [rows.n_taps, columns.n_taps],
            stride: 1,
            padding: [rows.padding, columns.padding],
        };
        let mut moves = Vec::with_capacity(rows.moves.len() * columns.moves.len());
        for [y, to_y] in &rows.moves {
            for [x, to_x] in &columns.moves {
                moves.push([y * forward.kernel[1] + x, to_y * columns.n_taps + to_x]);
            }
        }
        let taps = Taps { n_from: forward.n_taps(), n_to: geometry.n_taps(), moves };
        Self { geometry, taps, first: [rows.first, columns.first] }
    }

    /// Returns the offsets of the phase's cells, of `channels` each, in an image of the input of
    /// the `forward` convolution.
    pub(super) fn lattice(&self, forward: &Geometry, channels: usize) -> Lattice {
        let [y, x] = self.first;
        let [_, width] = forward.input;
        Lattice {
            start: (y * width + x) * channels,
            window: forward.stride * channels,
            row: forward.stride * width * channels,
        }
    }

    /// Copies `cells`, the gradient of the phase's cells, of `channels` each, into `gx`, the input
    /// gradient of the `forward` convolution.
    pub(super) fn scatter<T: Copy>(&self, cells: &[T], channels: usize, forward: &Geometry, gx: &mut [T]) {
        let Lattice { start, window, row } = self.lattice(forward, channels);
        let [n_rows, n_columns] = self.geometry.output;
        let images = gx.chunks_exact_mut(forward.input[0] * forward.input[1] * channels);
        for (gx, cells) in images.zip(cells.chunks_exact(n_rows * n_columns * channels)) {
            for (gx, cells) in gx[start..].chunks_mut(row).zip(cells.chunks_exact(n_columns * channels)) {
                for (to, cell) in gx.chunks_mut(window).zip(cells.chunks_exact(channels)) {
                    to[..channels].copy_from_slice(cell);
                }
            }
        }
    }
}

/// A phase on one axis.
struct Line {
    /// Row or column of the first cell.
    first: usize,
    /// Number of rows or columns of cells.
    n_cells: usize,
    /// Number of taps of the windows over the output gradient.
    n_taps: usize,
    /// Rows or columns before the output gradient that these windows cover.
    padding: usize,
    /// Index of each tap of the weights, and its index in these windows.
    moves: Vec<[usize; 2]>,
}

impl Line {
    /// Returns the lines of an axis that have cells and taps.
    fn all(forward: &Geometry, axis: usize) -> Vec<Self> {
        let mut lines = Vec::new();
        for first in 0..forward.stride.min(forward.input[axis]) {
            let line = Self::new(forward, axis, first);
            if !line.moves.is_empty() {
                lines.push(line);
            }
        }
        lines
    }

    fn new(forward: &Geometry, axis: usize, first: usize) -> Self {
        let stride = forward.stride;
        let padding = forward.padding[axis];
        let remainder = (first + padding) % stride;
        let last_window = (first + padding) / stride;
        let taps = (remainder..forward.kernel[axis]).step_by(stride);
        // If the first window ends before the first cell, the windows over the gradient would have
        // to start after the gradient's first row or column. They cannot, so taps of zero extend
        // them back to it.
        let n_taps = taps.len().max(last_window + 1);
        let moves = taps.enumerate().map(|(a, tap)| [tap, n_taps - 1 - a]).collect();
        Self {
            first,
            n_cells: (forward.input[axis] - first).div_ceil(stride),
            n_taps,
            padding: n_taps - 1 - last_window,
            moves,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every triple of a cell, a window that covers it, and the tap at the cell occurs once in
        /// the phases.
        #[test]
        fn phases_have_every_tap_of_every_window(
            h in 1usize..7,
            w in 1usize..7,
            kh in 1usize..5,
            kw in 1usize..4,
            stride in 1usize..4,
            padding in 0usize..4,
        ) {
            prop_assume!(h + 2 * padding >= kh && w + 2 * padding >= kw);
            let geometry = Geometry::new(2, [h, w], [kh, kw], stride, padding);
            let mut expected = Vec::new();
            geometry.for_each_row(0..geometry.n_windows(), |window, tap, n| {
                expected.extend((0..n).map(|i| (tap.cell + i, window, tap.index + i)));
            });
            let mut visited = Vec::new();
            for phase in Phase::all(&geometry) {
                let mut cells = vec![usize::MAX; geometry.n_cells()];
                let numbers: Vec<usize> = (0..phase.geometry.n_windows()).collect();
                phase.scatter(&numbers, 1, &geometry, &mut cells);
                phase.geometry.for_each_row(0..phase.geometry.n_windows(), |window, tap, n| {
                    let cell = cells.iter().position(|number| *number == window);
                    let cell = cell.expect("every window has a cell");
                    for i in 0..n {
                        let mapped = phase.taps.moves.iter().find(|[_, to]| *to == tap.index + i);
                        if let Some([from, _]) = mapped {
                            visited.push((cell, tap.cell + i, *from));
                        }
                    }
                });
            }
            expected.sort_unstable();
            visited.sort_unstable();
            prop_assert_eq!(visited, expected);
        }
    }
}
