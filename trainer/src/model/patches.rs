//! Views as bytes into normalised patch vectors, with the channels of a vector in the order of a convolution's
//! weight: color, row, column.
//!
//! ```text
//! [n, 3, size, size] bytes → [n, N, 3·p·p]        (byte / 255 - mean) / std by color
//! ```

use burn_tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};

/// Mean and deviation of ImageNet's channels, in units of 0..=1; everyone's normalisation but
/// SwAV's, which has a typing error in it.
const IMAGE_MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const IMAGE_STD: [f32; 3] = [0.229, 0.224, 0.225];

/// The vectors of `views`, and their shape, on the host.
pub fn patch_vectors(views: &[&[u8]], size_px: usize, patch_px: usize) -> (Vec<f32>, [usize; 3]) {
    let grid = size_px / patch_px;
    let plane = size_px * size_px;
    let n_views: usize = views.iter().map(|bytes| bytes.len() / (3 * plane)).sum();
    let mut out = Vec::with_capacity(n_views * grid * grid * 3 * patch_px * patch_px);
    for view in views.iter().flat_map(|bytes| bytes.chunks_exact(3 * plane)) {
        for patch in 0..grid * grid {
            let corner = (patch / grid) * patch_px * size_px + (patch % grid) * patch_px;
            for (channel, (mean, std)) in IMAGE_MEAN.into_iter().zip(IMAGE_STD).enumerate() {
                let (scale, shift) = (1.0 / (255.0 * std), mean / std);
                for row in 0..patch_px {
                    let start = channel * plane + corner + row * size_px;
                    let bytes = &view[start..start + patch_px];
                    out.extend(bytes.iter().map(|byte| f32::from(*byte) * scale - shift));
                }
            }
        }
    }
    (out, [n_views, grid * grid, 3 * patch_px * patch_px])
}

/// The bytes of `views` on `device`, `[n, 3, size, size]`.
pub fn bytes_on(device: &Device, views: &[&[u8]], size_px: usize) -> Tensor<4, Int> {
    let bytes = views.concat();
    let n = bytes.len() / (3 * size_px * size_px);
    let len = bytes.len();
    // As one row: CUDA's allocator pads rows, which then are copied one by one.
    let flat = Tensor::<1, Int>::from_data(TensorData::new(bytes, [len]), (device, DType::U8));
    flat.reshape([n, 3, size_px, size_px])
}

/// [`patch_vectors`] of [`bytes_on`] a device, by its operations: `[n, N, 3·p·p]` in f32.
pub fn normalised_patches(bytes: Tensor<4, Int>, patch_px: usize) -> Tensor<3> {
    let [n, _, size_px, _] = bytes.dims();
    let (grid, p, device) = (size_px / patch_px, patch_px, bytes.device());
    let by_channel =
        |f: fn(usize) -> f32| Tensor::<1>::from_floats([f(0), f(1), f(2)], &device).reshape([1, 3, 1, 1]);
    let scale = by_channel(|channel| 1.0 / (255.0 * IMAGE_STD[channel]));
    let shift = by_channel(|channel| IMAGE_MEAN[channel] / IMAGE_STD[channel]);
    let x = bytes.cast(FloatDType::F32) * scale - shift;
    // [n, 3, rows of patches, row, columns of patches, column] -> [n, patches, color, row, column]
    let x = x.reshape([n, 3, grid, p, grid, p]).permute([0, 2, 4, 1, 3, 5]);
    x.reshape([n, grid * grid, 3 * p * p])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::twin::devices;

    /// What a GPU makes of bytes is what the host makes of them.
    #[test]
    fn patch_vectors_are_the_same_by_device() {
        let (size_px, patch_px) = (12, 4);
        let bytes: Vec<u8> = (0..2 * 3 * size_px * size_px).map(|i| (i * 37 % 256) as u8).collect();
        let (a, b) = bytes.split_at(bytes.len() / 2);
        let (here, shape) = patch_vectors(&[a, b], size_px, patch_px);
        for device in devices().iter().filter(|device| device.supports_dtype(DType::U8)) {
            let there = normalised_patches(bytes_on(device, &[a, b], size_px), patch_px);
            assert_eq!(there.dims(), shape);
            let there = there.into_data().try_to_vec::<f32>().unwrap();
            assert!(here.iter().zip(&there).all(|(a, b)| (a - b).abs() < 1e-6));
        }
    }
}
