//! Conversion of views from stored values to normalized vectors, one for each cell of pixels, with
//! the values of a vector in the order of a convolution's weight: channel, row, column.
//!
//! ```text
//! [n, C, size, size] values → [n, N, C·p·p]        (value / unit - mean) / std by channel;  unit 255, 65535, or 1 for floats
//! ```

use augment::{Depth, MAX_CHANNELS, PixelFormat};
use burn_tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::tokens::Tokens;

/// Mean and standard deviation by channel, in units of the largest whole number, or of 1 for
/// floating-point values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Normalization {
    /// Means.
    pub mean: Vec<f32>,
    /// Standard deviations.
    pub std: Vec<f32>,
}

impl Default for Normalization {
    /// Returns ImageNet's values, the most common ones.
    fn default() -> Self {
        Self { mean: vec![0.485, 0.456, 0.406], std: vec![0.229, 0.224, 0.225] }
    }
}

impl Normalization {
    /// Returns values of 0.5 for `n_channels`.
    pub fn half(n_channels: usize) -> Self {
        Self { mean: vec![0.5; n_channels], std: vec![0.5; n_channels] }
    }

    /// Returns the number of channels.
    pub fn n_channels(&self) -> usize {
        self.mean.len()
    }

    /// Checks that there are as many means as deviations, and that all of them lie in their ranges.
    ///
    /// # Errors
    /// Description of the value that is out of range.
    pub fn validate(&self) -> Result<(), String> {
        let n_means = self.mean.len();
        let n_stds = self.std.len();
        if n_means != n_stds || !(1..=MAX_CHANNELS).contains(&n_means) {
            return Err(format!("there are {n_means} means but {n_stds} standard deviations"));
        }
        if let Some(std) = self.std.iter().find(|std| !(1e-6..=1e6).contains(*std)) {
            return Err(format!("a standard deviation is {std} but must lie in 0.000001..=1000000"));
        }
        if let Some(mean) = self.mean.iter().find(|mean| !(-1e6..=1e6).contains(*mean)) {
            return Err(format!("a mean is {mean} but must lie in -1000000..=1000000"));
        }
        Ok(())
    }
}

/// Pixels that a network takes: the type of their values, and the constants that normalize each
/// channel.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Pixels {
    /// Mean and deviation of each channel.
    pub normalization: Normalization,
    /// Type of the values.
    #[serde(rename = "bits", default, skip_serializing_if = "Depth::is_eight")]
    pub depth: Depth,
}

impl From<Normalization> for Pixels {
    /// Creates pixels of 8 bits.
    fn from(normalization: Normalization) -> Self {
        Self { normalization, depth: Depth::Eight }
    }
}

impl Pixels {
    /// Returns the format of the pixels.
    pub fn format(&self) -> PixelFormat {
        PixelFormat { n_channels: self.normalization.n_channels(), depth: self.depth }
    }

    /// Returns the factor and the term that normalize the stored values of each channel.
    fn scales_and_shifts(&self) -> impl Iterator<Item = (f32, f32)> {
        let Normalization { mean, std } = &self.normalization;
        let unit = self.depth.unit();
        mean.iter().zip(std).map(move |(mean, std)| (1.0 / (unit * std), mean / std))
    }
}

/// Conversion of pixels into the input of a network's first unit.
#[derive(Debug, Clone, PartialEq)]
pub struct PixelInput {
    /// Side of a cell, in pixels.
    pub cell_px: usize,
    /// Pixels that are converted.
    pub pixels: Pixels,
}

impl PixelInput {
    /// Returns the vectors of `views`, and their shape, on the host.
    pub fn vectors(&self, views: &[&[u8]], size_px: usize) -> (Vec<f32>, [usize; 3]) {
        match self.pixels.depth {
            Depth::Eight => self.vectors_of(views, size_px, |[byte]: [u8; 1]| f32::from(byte)),
            Depth::Sixteen => self.vectors_of(views, size_px, |pair| f32::from(u16::from_le_bytes(pair))),
            Depth::Float => self.vectors_of(views, size_px, f32::from_le_bytes),
        }
    }

    /// Returns the vectors of `views` whose values have `N` bytes, which `value` reads.
    fn vectors_of<const N: usize>(
        &self,
        views: &[&[u8]],
        size_px: usize,
        value: impl Fn([u8; N]) -> f32,
    ) -> (Vec<f32>, [usize; 3]) {
        let p = self.cell_px;
        let grid = size_px / self.cell_px;
        let plane = size_px * size_px;
        let n_channels = self.pixels.normalization.n_channels();
        let n_values = n_channels * plane;
        let n_views: usize = views.iter().map(|bytes| bytes.len() / (N * n_values)).sum();
        let constants: Vec<(f32, f32)> = self.pixels.scales_and_shifts().collect();
        let mut out = Vec::with_capacity(n_views * grid * grid * n_channels * p * p);
        for view in views.iter().flat_map(|bytes| bytes.as_chunks::<N>().0.chunks_exact(n_values)) {
            for cell in 0..grid * grid {
                let corner = (cell / grid) * p * size_px + (cell % grid) * p;
                for (channel, (scale, shift)) in constants.iter().enumerate() {
                    for row in 0..p {
                        let start = channel * plane + corner + row * size_px;
                        out.extend(
                            view[start..start + p].iter().map(|stored| value(*stored) * scale - shift),
                        );
                    }
                }
            }
        }
        (out, [n_views, grid * grid, n_channels * p * p])
    }

    /// Computes [`PixelInput::vectors`] of `bytes` on their device, with its operations: `[n, N,
    /// C·p·p]` in f32.
    pub fn vectors_on_device(&self, bytes: Tensor<4, Int>) -> Tensor<3> {
        let [n, n_channels, size_px, _] = bytes.dims();
        let grid = size_px / self.cell_px;
        let p = self.cell_px;
        let device = bytes.device();
        let (scales, shifts) = self.pixels.scales_and_shifts().unzip();
        let scales = channel_constants(scales, n_channels, &device);
        let shifts = channel_constants(shifts, n_channels, &device);
        let x = bytes.cast(FloatDType::F32) * scales - shifts;
        // [n, C, rows of cells, row, columns of cells, column] -> [n, cells, channel, row, column]
        let x = x.reshape([n, n_channels, grid, p, grid, p]).permute([0, 2, 4, 1, 3, 5]);
        x.reshape([n, grid * grid, n_channels * p * p])
    }

    /// Returns the input of a network for `views` of `size_px`, on `device`.
    pub fn tokens(&self, views: &[&[u8]], size_px: usize, device: &Device) -> Tokens {
        let (values, shape) = self.vectors(views, size_px);
        self.on_grid(Tensor::from_data(TensorData::new(values, shape), device), size_px)
    }

    /// Creates tokens from the vectors `x`, `[n, N, C·p·p]`, of views of `size_px`.
    pub fn on_grid(&self, x: Tensor<3>, size_px: usize) -> Tokens {
        Tokens::on_grid(x, [size_px / self.cell_px; 2])
    }
}

/// Copies a constant of each channel to `device`, `[1, C, 1, 1]`.
fn channel_constants(values: Vec<f32>, n_channels: usize, device: &Device) -> Tensor<4> {
    Tensor::<1>::from_data(TensorData::new(values, [n_channels]), device).reshape([1, n_channels, 1, 1])
}

/// Copies the bytes of `views` of `n_channels` to `device`, `[n, C, size, size]`.
pub fn copy_to_device(device: &Device, views: &[&[u8]], n_channels: usize, size_px: usize) -> Tensor<4, Int> {
    let bytes = views.concat();
    let n = bytes.len() / (n_channels * size_px * size_px);
    let len = bytes.len();
    // As one row: CUDA's allocator pads rows, which would then be copied one by one.
    let flat = Tensor::<1, Int>::from_data(TensorData::new(bytes, [len]), (device, DType::U8));
    flat.reshape([n, n_channels, size_px, size_px])
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::ops::testing::devices;

    /// Vectors that a GPU computes from bytes equal those of the host.
    #[test]
    fn patch_vectors_are_equal_on_all_devices() {
        let size_px = 12;
        let input = PixelInput { cell_px: 4, pixels: Pixels::default() };
        let bytes: Vec<u8> = (0..2 * 3 * size_px * size_px).map(|i| (i * 37 % 256) as u8).collect();
        let (a, b) = bytes.split_at(bytes.len() / 2);
        let (host_vectors, shape) = input.vectors(&[a, b], size_px);
        for device in devices().iter().filter(|device| device.supports_dtype(DType::U8)) {
            let vectors = input.vectors_on_device(copy_to_device(device, &[a, b], 3, size_px));
            assert_eq!(vectors.dims(), shape);
            let vectors = vectors.into_data().try_to_vec::<f32>().unwrap();
            assert!(host_vectors.iter().zip(&vectors).all(|(a, b)| (a - b).abs() < 1e-6));
        }
    }

    /// Checks the normalized values of one pixel of two channels, stored as `bytes`.
    fn assert_normalized(depth: Depth, bytes: &[u8], expected: [f32; 2]) {
        let normalization = Normalization { mean: vec![0.25, 0.5], std: vec![0.5, 0.125] };
        let pixels = Pixels { normalization, depth };
        assert_eq!(pixels.format(), PixelFormat { n_channels: 2, depth });
        let (values, shape) = PixelInput { cell_px: 1, pixels }.vectors(&[bytes], 1);
        assert_eq!(shape, [1, 1, 2]);
        assert!(values.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{values:?}");
    }

    #[test]
    fn values_of_every_depth_are_normalized() {
        assert_normalized(Depth::Eight, &[51, 255], [-0.1, 4.0]);
        let sixteen = [13_107u16, 65_535].map(u16::to_le_bytes).concat();
        assert_normalized(Depth::Sixteen, &sixteen, [-0.1, 4.0]);
        let floats = [0.2f32, -3.0].map(f32::to_le_bytes).concat();
        assert_normalized(Depth::Float, &floats, [-0.1, -28.0]);
    }
}
