//! The gradient at the input of a convolution, as convolutions of the output's gradient with a
//! stride of one.
//!
//! ```text
//! gx[s·i + r - p, c] = Σ_a,o g[i - a, o] · w[o, c, r + s·a]        a ≥ 0
//! ```
//!
//! on either axis, s the stride and p the padding: cells whose position plus p leaves the same
//! remainder r when divided by s are a phase. They meet every s-th tap from r on, in reverse. A
//! stride of one has one phase.

use super::channels::Taps;
use super::geometry::{Geometry, Lattice};

/// The cells of a convolution's input whose positions have the same remainders, and the convolution
/// that computes their gradient.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Phase {
    /// Windows over the output's gradient, one for each cell of the phase.
    pub geometry: Geometry,
    /// Taps of the weights, with their places in these windows.
    pub taps: Taps,
    /// Row and column of the phase's first cell.
    first: [usize; 2],
}

impl Phase {
    /// Returns the phases of a convolution that have cells and taps. Cells of the others are
    /// covered by no window: their gradient is zero.
    pub(super) fn all(geometry: &Geometry) -> Vec<Self> {
        let [rows, columns] = [0, 1].map(|axis| Line::all(geometry, axis));
        let columns = columns.iter();
        rows.iter().flat_map(|row| columns.clone().map(|column| Self::new(geometry, [row, column]))).collect()
    }

    fn new(whole: &Geometry, lines: [&Line; 2]) -> Self {
        let [rows, columns] = lines;
        let geometry = Geometry {
            n_images: whole.n_images,
            input: whole.output,
            output: lines.map(|line| line.n_cells),
            kernel: lines.map(|line| line.n_taps),
            stride: 1,
            padding: lines.map(|line| line.padding),
        };
        let moves = rows.moves.iter().flat_map(|[y, to_y]| {
            columns.moves.iter().map(move |[x, to_x]| [y * whole.kernel[1] + x, to_y * columns.n_taps + to_x])
        });
        let taps = Taps { n_from: whole.n_taps(), n_to: geometry.n_taps(), moves: moves.collect() };
        Self { geometry, taps, first: lines.map(|line| line.first) }
    }

    /// Returns the places of the phase's cells, of `channels` each, in an image of the `whole`
    /// convolution's input.
    pub(super) fn lattice(&self, whole: &Geometry, channels: usize) -> Lattice {
        let [y, x] = self.first;
        let [_, width] = whole.input;
        Lattice {
            start: (y * width + x) * channels,
            window: whole.stride * channels,
            row: whole.stride * width * channels,
        }
    }

    /// Copies the gradient of the phase's cells, of `channels` each, into that of the input of the
    /// `whole` convolution.
    pub(super) fn put<T: Copy>(&self, of_phase: &[T], channels: usize, whole: &Geometry, gx: &mut [T]) {
        let Lattice { start, window, row } = self.lattice(whole, channels);
        let [n_rows, n_columns] = self.geometry.output;
        let images = gx.chunks_exact_mut(whole.input[0] * whole.input[1] * channels);
        for (gx, of_phase) in images.zip(of_phase.chunks_exact(n_rows * n_columns * channels)) {
            for (gx, cells) in gx[start..].chunks_mut(row).zip(of_phase.chunks_exact(n_columns * channels)) {
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
    /// Rows or columns of cells.
    n_cells: usize,
    /// Taps of the windows over the output's gradient.
    n_taps: usize,
    /// Rows or columns before the output's gradient that these windows reach.
    padding: usize,
    /// Index of each tap of the weights, and its index in these windows.
    moves: Vec<[usize; 2]>,
}

impl Line {
    /// Returns the lines of an axis that have cells and taps.
    fn all(geometry: &Geometry, axis: usize) -> Vec<Self> {
        let stride = geometry.stride;
        let padding = geometry.padding[axis];
        let kernel = geometry.kernel[axis];
        let n = geometry.input[axis];
        let line = |first: usize| {
            let remainder = (first + padding) % stride;
            let last_window = (first + padding) / stride;
            let taps = (remainder..kernel).step_by(stride);
            // Where the first window ends before the first cell, the windows over the gradient
            // would have to start after its first one. They cannot, and reach back to it by taps of
            // zero.
            let n_taps = taps.len().max(last_window + 1);
            let moves = taps.enumerate().map(|(a, tap)| [tap, n_taps - 1 - a]).collect();
            Self {
                first,
                n_cells: (n - first).div_ceil(stride),
                n_taps,
                padding: n_taps - 1 - last_window,
                moves,
            }
        };
        (0..stride.min(n)).map(line).filter(|line| !line.moves.is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Windows of phases over the output's gradient are the windows over the input, seen from
        /// its cells: each cell meets each window with the same tap, once.
        #[test]
        fn phases_have_every_tap_of_every_window(
            h in 1usize..7, w in 1usize..7, kh in 1usize..5, kw in 1usize..4, stride in 1usize..4, padding in 0usize..4,
        ) {
            prop_assume!(h + 2 * padding >= kh && w + 2 * padding >= kw);
            let geometry = Geometry::new(2, [h, w], [kh, kw], stride, padding);
            let mut expected = Vec::new();
            geometry.for_each_row(0..geometry.n_windows(), |window, tap, n| {
                expected.extend((0..n).map(|i| (tap.cell + i, window, tap.number + i)));
            });
            let mut found = Vec::new();
            for phase in Phase::all(&geometry) {
                let mut cells = vec![usize::MAX; geometry.n_cells()];
                let numbers: Vec<usize> = (0..phase.geometry.n_windows()).collect();
                phase.put(&numbers, 1, &geometry, &mut cells);
                phase.geometry.for_each_row(0..phase.geometry.n_windows(), |window, tap, n| {
                    let cell = cells.iter().position(|number| *number == window).expect("every window has a cell");
                    for i in 0..n {
                        let of_phase = phase.taps.moves.iter().find(|[_, to]| *to == tap.number + i);
                        found.extend(of_phase.map(|[from, _]| (cell, tap.cell + i, *from)));
                    }
                });
            }
            expected.sort_unstable();
            found.sort_unstable();
            prop_assert_eq!(found, expected);
        }
    }
}
