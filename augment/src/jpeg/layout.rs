//! Geometry of an image and of its components.

use super::coefficients::{BlockRows, n_mcus};
use super::rows::{Upsampling, Window};
use super::segments::{ColorSpace, Frame};

/// Geometry of an image and of its components, in pixels, blocks and MCUs.
pub(super) struct Image {
    /// Number of rows of pixels.
    height: usize,
    /// Color space of the components.
    pub(super) color_space: ColorSpace,
    /// Upsampling of each component to the size of the image.
    pub(super) upsamplings: Vec<Upsampling>,
    /// Numbers of blocks of an MCU across and down, by component.
    blocks: Vec<[usize; 2]>,
    /// Numbers of MCUs across and down.
    pub(super) n_mcus: [usize; 2],
    /// Number of rows of pixels per MCU.
    mcu_height: usize,
}

impl Image {
    /// Computes the geometry that a frame header states.
    pub(super) fn new(frame: &Frame, color_space: ColorSpace) -> Self {
        let max = frame.max_sampling();
        let size = [frame.width_px as usize, frame.height_px as usize];
        let mut upsamplings = Vec::with_capacity(frame.components.len());
        for component in &frame.components {
            let factors = [max[0] / component.h, max[1] / component.v];
            let size = [size[0].div_ceil(factors[0]), size[1].div_ceil(factors[1])];
            upsamplings.push(Upsampling { size, factors });
        }
        Self {
            height: size[1],
            color_space,
            upsamplings,
            blocks: frame.components.iter().map(|component| [component.h, component.v]).collect(),
            n_mcus: n_mcus(frame),
            mcu_height: 8 * max[1],
        }
    }

    /// Resizes the windows to two rows of MCUs.
    pub(super) fn resize_windows(&self, windows: &mut Vec<Window>) {
        windows.resize_with(self.blocks.len(), Window::default);
        for (window, [h, v]) in windows.iter_mut().zip(&self.blocks) {
            window.set_size(8 * h * self.n_mcus[0], 2 * 8 * v);
        }
    }

    /// Resizes `coefficients` to `n` rows of MCUs, and sets all of them to zero.
    pub(super) fn clear_coefficients(&self, coefficients: &mut Vec<BlockRows>, n: usize) {
        coefficients.resize_with(self.blocks.len(), BlockRows::default);
        for (rows, [h, v]) in coefficients.iter_mut().zip(&self.blocks) {
            rows.clear(h * self.n_mcus[0], v * n);
        }
    }

    /// Returns the rows of pixels that can be written once row `mcu_row` of MCUs is decoded.
    pub(super) fn complete_rows(&self, mcu_row: usize) -> std::ops::Range<usize> {
        self.n_complete_rows(mcu_row)..self.n_complete_rows(mcu_row + 1)
    }

    /// Returns the number of rows of pixels that can be written once `n_mcu_rows` rows of MCUs are
    /// decoded. The last rows of an MCU need the samples below them.
    fn n_complete_rows(&self, n_mcu_rows: usize) -> usize {
        if n_mcu_rows == self.n_mcus[1] {
            self.height
        } else {
            (n_mcu_rows * self.mcu_height).saturating_sub(self.mcu_height / 8)
        }
    }
}
