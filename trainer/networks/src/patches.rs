//! Conversion of views from bytes to normalized vectors, one for each cell of pixels, with the values of a vector in
//! the order of a convolution's weight: color, row, column.
//!
//! ```text
//! [n, 3, size, size] bytes → [n, N, 3·p·p]        (byte / 255 - mean) / std by color
//! ```

use burn_tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::features::Features;

/// Mean and standard deviation by color, in units of 0..=1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Normalization {
    /// Mean.
    pub mean: [f32; 3],
    /// Standard deviation.
    pub std: [f32; 3],
}

impl Default for Normalization {
    /// Returns ImageNet's values, the most common ones.
    fn default() -> Self {
        Self { mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225] }
    }
}

impl Normalization {
    /// Checks that deviations and means lie in their ranges.
    ///
    /// # Errors
    /// Description of the value that is out of range.
    pub fn validate(&self) -> Result<(), String> {
        if let Some(std) = self.std.iter().find(|std| !(1e-3..=1e3).contains(*std)) {
            return Err(format!("a color's deviation is {std} and must lie in 0.001..=1000"));
        }
        if let Some(mean) = self.mean.iter().find(|mean| !(-1e3..=1e3).contains(*mean)) {
            return Err(format!("a color's mean is {mean} and must lie in -1000..=1000"));
        }
        Ok(())
    }
}

/// Conversion of pixels into the input of a network's first unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PixelInput {
    /// Side of a cell, in pixels.
    pub cell_px: usize,
    /// Mean that is subtracted and deviation that is divided by.
    pub normalization: Normalization,
}

impl PixelInput {
    /// Returns the vectors of `views`, and their shape, on the host.
    pub fn vectors(&self, views: &[&[u8]], size_px: usize) -> (Vec<f32>, [usize; 3]) {
        let Normalization { mean, std } = self.normalization;
        let (p, grid, plane) = (self.cell_px, size_px / self.cell_px, size_px * size_px);
        let n_views: usize = views.iter().map(|bytes| bytes.len() / (3 * plane)).sum();
        let mut out = Vec::with_capacity(n_views * grid * grid * 3 * p * p);
        for view in views.iter().flat_map(|bytes| bytes.chunks_exact(3 * plane)) {
            for cell in 0..grid * grid {
                let corner = (cell / grid) * p * size_px + (cell % grid) * p;
                for (channel, (mean, std)) in mean.into_iter().zip(std).enumerate() {
                    let (scale, shift) = (1.0 / (255.0 * std), mean / std);
                    for row in 0..p {
                        let start = channel * plane + corner + row * size_px;
                        out.extend(
                            view[start..start + p].iter().map(|byte| f32::from(*byte) * scale - shift),
                        );
                    }
                }
            }
        }
        (out, [n_views, grid * grid, 3 * p * p])
    }

    /// Computes [`PixelInput::vectors`] of `bytes` on their device, with its operations: `[n, N, 3·p·p]` in f32.
    pub fn vectors_on_device(&self, bytes: Tensor<4, Int>) -> Tensor<3> {
        let Normalization { mean, std } = self.normalization;
        let [n, _, size_px, _] = bytes.dims();
        let (grid, p, device) = (size_px / self.cell_px, self.cell_px, bytes.device());
        let by_channel = |values: [f32; 3]| Tensor::<1>::from_floats(values, &device).reshape([1, 3, 1, 1]);
        let scale = by_channel(std.map(|std| 1.0 / (255.0 * std)));
        let shift = by_channel([0, 1, 2].map(|channel| mean[channel] / std[channel]));
        let x = bytes.cast(FloatDType::F32) * scale - shift;
        // [n, 3, rows of cells, row, columns of cells, column] -> [n, cells, color, row, column]
        let x = x.reshape([n, 3, grid, p, grid, p]).permute([0, 2, 4, 1, 3, 5]);
        x.reshape([n, grid * grid, 3 * p * p])
    }

    /// Returns the input of a network for `views` of `size_px`, on `device`.
    pub fn features(&self, views: &[&[u8]], size_px: usize, device: &Device) -> Features {
        let (values, shape) = self.vectors(views, size_px);
        self.placed(Tensor::from_data(TensorData::new(values, shape), device), size_px)
    }

    /// Adds the grid to vectors `[n, N, 3·p·p]` of views of `size_px`.
    pub fn placed(&self, x: Tensor<3>, size_px: usize) -> Features {
        Features::on_grid(x, [size_px / self.cell_px; 2])
    }
}

/// Copies the bytes of `views` to `device`, `[n, 3, size, size]`.
pub fn copy_to_device(device: &Device, views: &[&[u8]], size_px: usize) -> Tensor<4, Int> {
    let bytes = views.concat();
    let n = bytes.len() / (3 * size_px * size_px);
    let len = bytes.len();
    // As one row: CUDA's allocator pads rows, which would then be copied one by one.
    let flat = Tensor::<1, Int>::from_data(TensorData::new(bytes, [len]), (device, DType::U8));
    flat.reshape([n, 3, size_px, size_px])
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::ops::twin::devices;

    /// Vectors that a GPU computes from bytes equal those of the host.
    #[test]
    fn patch_vectors_are_the_same_by_device() {
        let size_px = 12;
        let input = PixelInput { cell_px: 4, normalization: Normalization::default() };
        let bytes: Vec<u8> = (0..2 * 3 * size_px * size_px).map(|i| (i * 37 % 256) as u8).collect();
        let (a, b) = bytes.split_at(bytes.len() / 2);
        let (here, shape) = input.vectors(&[a, b], size_px);
        for device in devices().iter().filter(|device| device.supports_dtype(DType::U8)) {
            let there = input.vectors_on_device(copy_to_device(device, &[a, b], size_px));
            assert_eq!(there.dims(), shape);
            let there = there.into_data().try_to_vec::<f32>().unwrap();
            assert!(here.iter().zip(&there).all(|(a, b)| (a - b).abs() < 1e-6));
        }
    }
}
