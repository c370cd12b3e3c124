//! Positions of the windows of a convolution or pooling.

use std::ops::Range;

/// Windows over the grids of a batch of images, with channels last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    /// Number of images.
    pub n_images: usize,
    /// Rows and columns of the input.
    pub input: [usize; 2],
    /// Rows and columns of the output: one window each.
    pub output: [usize; 2],
    /// Rows and columns of a window.
    pub kernel: [usize; 2],
    /// Distance between two windows, in cells.
    pub stride: usize,
    /// Rows above and columns to the left of the input that windows cover.
    pub padding: [usize; 2],
}

/// A cell of a window that lies inside the input.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tap {
    /// Index of the cell in its window.
    pub index: usize,
    /// Index of the cell in the input, counted over all images.
    pub cell: usize,
}

/// Offsets of the windows' results in the memory of an image, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lattice {
    /// Offset of the first window's result.
    pub start: usize,
    /// Distance between two neighbors in a row.
    pub window: usize,
    /// Distance between two neighboring rows.
    pub row: usize,
}

impl Geometry {
    /// Returns windows of `kernel` over `n_images` grids of `input`, `stride` apart, with `padding`
    /// around the input.
    ///
    /// # Panics
    /// If a window is larger than the padded input: recipe validation checks grids.
    pub(super) fn new(
        n_images: usize,
        input: [usize; 2],
        kernel: [usize; 2],
        stride: usize,
        padding: usize,
    ) -> Self {
        let output = [0, 1].map(|axis| (input[axis] + 2 * padding - kernel[axis]) / stride + 1);
        Self { n_images, input, output, kernel, stride, padding: [padding; 2] }
    }

    /// Returns the offsets of results of `channels` elements each, one after another.
    pub(super) fn lattice(&self, channels: usize) -> Lattice {
        Lattice { start: 0, window: channels, row: self.output[1] * channels }
    }

    /// Returns the number of windows of all images.
    pub(super) fn n_windows(&self) -> usize {
        self.n_images * self.output[0] * self.output[1]
    }

    /// Returns the rows and columns of the input with the padding before it and the cells behind it
    /// that windows cover.
    pub(super) fn padded(&self) -> [usize; 2] {
        [0, 1].map(|axis| {
            let covered = (self.output[axis] - 1) * self.stride + self.kernel[axis];
            covered.max(self.padding[axis] + self.input[axis])
        })
    }

    /// Returns the number of cells of all images.
    pub(super) fn n_cells(&self) -> usize {
        self.n_images * self.input[0] * self.input[1]
    }

    /// Returns the number of cells of a window.
    pub(super) fn n_taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Returns whether every window is one cell and every cell a window.
    pub(super) fn is_pointwise(&self) -> bool {
        self.kernel == [1, 1] && self.stride == 1 && self.padding == [0, 0] && self.output == self.input
    }

    /// Calls `row` for each row of each of the `windows` that has taps inside the input, in order,
    /// with the index of the window among `windows`, the first such tap of the row, and their
    /// number.
    #[inline(always)]
    pub(super) fn for_each_row(&self, windows: Range<usize>, mut row: impl FnMut(usize, Tap, usize)) {
        let [height, width] = self.input;
        let [_, n_columns] = self.output;
        let per_image = self.output[0] * n_columns;
        for (i, window) in windows.enumerate() {
            let image = window / per_image;
            let within = window % per_image;
            let top = (within / n_columns * self.stride) as isize - self.padding[0] as isize;
            let left = (within % n_columns * self.stride) as isize - self.padding[1] as isize;
            let first = (-left).max(0) as usize;
            let last = (width as isize - left).clamp(0, self.kernel[1] as isize) as usize;
            let n = last.saturating_sub(first);
            for ky in 0..self.kernel[0] {
                let y = top + ky as isize;
                if y < 0 || y >= height as isize || n == 0 {
                    continue;
                }
                let cell = (image * height + y as usize) * width + (left + first as isize) as usize;
                row(i, Tap { index: ky * self.kernel[1] + first, cell }, n);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every pair of a window and a cell of it inside the input is visited once.
        #[test]
        fn rows_contain_the_taps_inside_the_input(
            h in 1usize..6,
            w in 1usize..6,
            kh in 1usize..4,
            kw in 1usize..4,
            stride in 1usize..5,
            padding in 0usize..5,
        ) {
            prop_assume!(h + 2 * padding >= kh && w + 2 * padding >= kw);
            let geometry = Geometry::new(2, [h, w], [kh, kw], stride, padding);
            let mut visited = Vec::new();
            geometry.for_each_row(0..geometry.n_windows(), |window, tap, n| {
                visited.extend((0..n).map(|i| (window, tap.index + i, tap.cell + i)));
            });
            let mut expected = Vec::new();
            for window in 0..geometry.n_windows() {
                let [rows, columns] = geometry.output;
                let image = window / (rows * columns);
                let top = window / columns % rows * stride;
                let left = window % columns * stride;
                for tap in 0..kh * kw {
                    let y = top + tap / kw;
                    let x = left + tap % kw;
                    if (padding..h + padding).contains(&y) && (padding..w + padding).contains(&x) {
                        expected.push((window, tap, (image * h + y - padding) * w + x - padding));
                    }
                }
            }
            prop_assert_eq!(visited, expected);
        }
    }
}
