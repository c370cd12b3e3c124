//! Convolution over the grid of features, with channels last.
//!
//! ```text
//! y[b, i, o] = Σ_t,c w[o, c, t] · x[b, s·i + t - p, c]
//! gx[b, j, c] = Σ_t,o w[o, c, t] · g[b, i, o]               where s·i + t - p = j
//! gw[o, c, t] = Σ_b,i g[b, i, o] · x[b, s·i + t - p, c]
//! ```
//!
//! x `[B, H·W, C]`, w `[O, C/G, kh, kw]` as PyTorch stores it, y `[B, H'·W', O]` with `H' = ⌊(H +
//! 2p - kh) / s⌋ + 1`; i is a window, t its taps, c the input channels of the group that o belongs
//! to; x is zero outside its grid.

mod channels;
mod cpu;
mod geometry;
mod grouped;
mod phases;
mod pool;

pub use pool::max_pool;

use std::marker::PhantomData;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::module::conv2d;
use burn_tensor::ops::ConvOptions;
use burn_tensor::{DType, Tensor};
use half::bf16;

use self::channels::{Channels, pack, unpack};
use self::geometry::Geometry;
use super::bridge::{Kernel, run};
use super::cast::cast;
use super::cpu::{contiguous, dims, elements, flex_dtype, tensor};
use super::linear;
use super::number::Number;
use super::weights::Weights;

/// Stride and padding of windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Distance between two windows, in cells.
    pub stride: usize,
    /// Cells of zeros around the input.
    pub padding: usize,
}

impl Window {
    /// Returns the number of rows or columns of windows of `kernel` cells over `side` cells.
    pub fn output(self, side: usize, kernel: usize) -> usize {
        (side + 2 * self.padding - kernel) / self.stride + 1
    }
}

/// Convolves `x`, `[B, H·W, C]` on `grid`, with `weight`, `[O, C/G, kh, kw]` for `G` groups of
/// channels; returns `[B, H'·W', O]` and its grid. `weight` is f32, or bf16 if `x` is bf16 too; its
/// gradient is f32.
pub fn conv(x: Tensor<3>, grid: [usize; 2], weight: Tensor<4>, window: Window) -> (Tensor<3>, [usize; 2]) {
    let [b, _, c] = x.dims();
    let [_, group_channels, kh, kw] = weight.dims();
    let geometry = Geometry::new(b, grid, [kh, kw], window.stride, window.padding);
    let groups = c / group_channels;
    #[cfg(feature = "cube")]
    if super::cube::is_cube(&x) {
        let kernel = cube_kernel(&geometry, groups, None);
        return (run(kernel, [x.into(), weight.into()]), geometry.output);
    }
    let y = match flex_dtype(&x) {
        Some(DType::F32) => run(Conv::<f32>::new(geometry, groups), [x.into(), weight.into()]),
        Some(DType::BF16) => run(Conv::<bf16>::new(geometry, groups), [x.into(), weight.into()]),
        _ => plain(x, weight, &geometry),
    };
    (y, geometry.output)
}

/// Returns the kernel for GPUs; `chunk_len` limits the number of images whose windows are copied at
/// a time.
#[cfg(feature = "cube")]
fn cube_kernel(geometry: &Geometry, n_groups: usize, chunk_len: Option<usize>) -> super::cube::Conv {
    let windows = super::cube::Windows {
        input: geometry.input.into(),
        output: geometry.output.into(),
        kernel: geometry.kernel.into(),
        stride: geometry.stride,
        padding: geometry.padding[0],
    };
    let is_linear = n_groups == 1 && geometry.is_pointwise();
    super::cube::Conv { windows, n_groups, is_linear, chunk_len }
}

/// Computes the convolution with Burn's `conv2d`.
fn plain(x: Tensor<3>, weight: Tensor<4>, geometry: &Geometry) -> Tensor<3> {
    let [b, _, c] = x.dims();
    let [o, group_channels, _, _] = weight.dims();
    let [h, w] = geometry.input;
    let [rows, columns] = geometry.output;
    let x = x.reshape([b, h, w, c]).permute([0, 3, 1, 2]);
    let options = ConvOptions::new([geometry.stride; 2], geometry.padding, [1, 1], c / group_channels);
    let weight = cast(weight, x.dtype());
    let y = conv2d(x, weight, None, options);
    y.permute([0, 2, 3, 1]).reshape([b, rows * columns, o])
}

/// Kernel for `x` with elements of type `T`.
#[derive(Debug, Clone)]
struct Conv<T> {
    geometry: Geometry,
    groups: usize,
    numbers: PhantomData<T>,
}

impl<T> Conv<T> {
    fn new(geometry: Geometry, groups: usize) -> Self {
        Self { geometry, groups, numbers: PhantomData }
    }

    /// Returns whether the convolution is a matrix product of the cells and the weight, without
    /// reordering the weight.
    fn is_linear(&self) -> bool {
        self.groups == 1 && self.geometry.is_pointwise()
    }

    /// Returns the sizes of that product: cells, input channels, output channels.
    fn sizes(&self, channels: Channels) -> [usize; 3] {
        [self.geometry.n_cells(), channels.input, channels.output]
    }

    fn channels(&self, x: &FlexTensor, weight: &FlexTensor) -> Channels {
        let [_, _, input]: [usize; 3] = dims(x);
        let [output, ..]: [usize; 4] = dims(weight);
        Channels { input, output, groups: self.groups }
    }
}

impl<T: Number> Kernel<Flex, 2> for Conv<T> {
    type Saved = (FlexTensor, FlexTensor);

    fn forward(&self, [x, weight]: [FlexTensor; 2]) -> (FlexTensor, Self::Saved) {
        let x = contiguous(&x);
        let weight = contiguous(&weight);
        let channels = self.channels(&x, &weight);
        let values = elements::<T>(&x);
        let n_taps = self.geometry.n_taps();
        let y = match Weights::from_tensor(&weight) {
            weight if self.is_linear() => linear::times_transposed(values, weight, self.sizes(channels)),
            Weights::Wide(weight) => {
                cpu::forward(values, &pack(weight, channels, n_taps), channels, &self.geometry)
            }
            Weights::Narrow(weight) => {
                cpu::forward(values, &pack(weight, channels, n_taps), channels, &self.geometry)
            }
        };
        let [rows, columns] = self.geometry.output;
        (tensor(y, [self.geometry.n_images, rows * columns, channels.output]), (x, weight))
    }

    fn backward(
        &self,
        (x, weight): Self::Saved,
        grad: FlexTensor,
        wanted: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        let channels = self.channels(&x, &weight);
        let grad = contiguous(&grad);
        let gx = wanted[0].then(|| {
            let grad = elements::<T>(&grad);
            let gx = match Weights::from_tensor(&weight) {
                weight if self.is_linear() => {
                    let [m, c, o] = self.sizes(channels);
                    linear::times_weight(grad, weight, [m, o, c])
                }
                Weights::Wide(weight) => cpu::input_gradient(grad, weight, channels, &self.geometry),
                Weights::Narrow(weight) => cpu::input_gradient(grad, weight, channels, &self.geometry),
            };
            tensor(gx, dims::<3>(&x))
        });
        let gw = wanted[1].then(|| {
            let x = elements::<T>(&x);
            let grad = elements(&grad);
            let gw = if self.is_linear() {
                let [m, c, o] = self.sizes(channels);
                linear::weight_gradient(grad, x, [m, o, c])
            } else {
                let packed = cpu::weight_gradient(x, grad, channels, &self.geometry);
                unpack(&packed, channels, self.geometry.n_taps())
            };
            tensor(gw, dims::<4>(&weight))
        });
        [gx, gw]
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::Device;

    use super::*;
    use crate::ops::testing::{assert_close, assert_gradients_close, backward, devices, leaves, types};

    /// Number of images, grid, input and output channels, groups, kernel, stride, padding.
    type Case = (usize, [usize; 2], [usize; 2], usize, [usize; 2], usize, usize);

    const CASES: [Case; 24] = [
        (2, [5, 7], [6, 10], 1, [3, 3], 1, 1),
        (2, [5, 7], [6, 10], 2, [3, 3], 1, 1),
        (3, [7, 6], [4, 8], 1, [3, 3], 2, 1),
        (2, [9, 5], [6, 6], 6, [3, 3], 2, 1),
        (2, [9, 21], [16, 16], 2, [3, 3], 1, 1),
        (2, [9, 21], [32, 48], 2, [3, 3], 2, 1),
        (1, [1, 2], [16, 32], 2, [3, 3], 2, 1),
        (2, [1, 1], [5, 3], 1, [3, 3], 1, 1),
        (2, [1, 1], [5, 3], 1, [1, 1], 2, 0),
        (2, [6, 5], [5, 9], 1, [1, 1], 1, 0),
        (2, [6, 5], [4, 8], 2, [1, 1], 2, 0),
        (1, [13, 11], [3, 4], 1, [7, 5], 2, 3),
        (2, [5, 7], [16, 32], 2, [1, 1], 2, 0),
        (1, [4, 7], [16, 16], 2, [1, 1], 3, 0),
        (1, [3, 3], [64, 64], 2, [2, 2], 2, 0),
        (1, [3, 1], [48, 16], 2, [5, 3], 1, 2),
        (1, [2, 3], [16, 16], 2, [1, 1], 1, 1),
        (2, [5, 7], [4, 8], 1, [2, 2], 2, 0),
        (1, [3, 3], [5, 7], 1, [2, 2], 2, 0),
        (1, [5, 4], [4, 6], 1, [3, 3], 3, 1),
        (2, [6, 9], [16, 32], 2, [4, 3], 2, 1),
        (2, [7, 6], [16, 16], 2, [3, 3], 2, 0),
        (2, [5, 7], [16, 24], 1, [3, 3], 3, 1),
        (1, [4, 5], [16, 16], 2, [2, 2], 2, 3),
    ];

    #[test]
    fn matches_plain_forward_and_backward() {
        for device in devices() {
            for (dtype, tolerance) in types(&device, 1e-5) {
                for case in CASES {
                    check(&device, case, dtype, tolerance);
                }
            }
        }
    }

    fn check(device: &Device, case: Case, dtype: DType, tolerance: f32) {
        let (b, grid, [c, o], groups, [kh, kw], stride, padding) = case;
        let x = leaves(device, &[[b, grid[0] * grid[1], c]], 1).remove(0);
        let weight = leaves(device, &[[o, c / groups, kh, kw]], 2).remove(0);
        let window = Window { stride, padding };
        let (y, output) = conv(cast(x.clone(), dtype), grid, weight.clone(), window);
        if dtype == DType::BF16 {
            let bf16_weight = cast(weight.clone(), dtype);
            let (with_bf16_weight, _) = conv(cast(x.clone(), dtype), grid, bf16_weight, window);
            with_bf16_weight.into_data().assert_eq(&y.clone().into_data(), true);
        }
        assert_eq!(y.dtype(), dtype);
        assert_eq!(output, [window.output(grid[0], kh), window.output(grid[1], kw)]);
        let geometry = Geometry::new(b, grid, [kh, kw], stride, padding);
        let expected = plain(cast(x.clone(), dtype), weight.clone(), &geometry);
        assert_close("forward", y.clone().inner(), expected.clone().inner(), tolerance);
        let grads = backward(y);
        let expected = backward(expected);
        assert_eq!(weight.grad(&grads).expect("leaf").dtype(), DType::F32);
        assert_gradients_close("input", &x, &grads, &expected, tolerance);
        assert_gradients_close("weight", &weight, &grads, &expected, tolerance);
    }

    fn sines(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.37).sin()).collect()
    }

    /// There are more windows than a block holds.
    #[test]
    fn results_do_not_depend_on_blocks() {
        let geometry = Geometry::new(3, [64, 64], [3, 3], 1, 1);
        let channels = Channels { input: 16, output: 4, groups: 1 };
        let x = sines(geometry.n_cells() * 16);
        let packed = sines(9 * 16 * 4);
        let y = cpu::forward(&x, &packed, channels, &geometry);
        let one_image = Geometry { n_images: 1, ..geometry };
        for image in 0..3 {
            let x = &x[image * 65_536..(image + 1) * 65_536];
            let image_y = cpu::forward(x, &packed, channels, &one_image);
            let batch_y = &y[image * image_y.len()..(image + 1) * image_y.len()];
            assert!(image_y.iter().zip(batch_y).all(|(a, b)| (a - b).abs() <= 1e-5));
        }
        let grad = sines(geometry.n_windows() * 4);
        let batch_gradient = cpu::weight_gradient(&x, &grad, channels, &geometry);
        let mut sum = vec![0.0; batch_gradient.len()];
        for image in 0..3 {
            let x = &x[image * 65_536..];
            let grad = &grad[image * 16_384..(image + 1) * 16_384];
            let image_gradient = cpu::weight_gradient(x, grad, channels, &one_image);
            for (sum, value) in sum.iter_mut().zip(image_gradient) {
                *sum += value;
            }
        }
        let agrees = sum.iter().zip(&batch_gradient).all(|(a, b)| (a - b).abs() <= 1e-3);
        assert!(agrees, "sums of some thousand sines");
    }

    /// On a GPU, a batch whose windows do not fit into memory at once is convolved in parts, in the
    /// forward and the backward pass, with more input or more output channels.
    #[cfg(feature = "cube")]
    #[test]
    fn parts_of_a_batch_equal_the_batch() {
        for device in devices() {
            for (channels, n_groups, kernel) in [([6, 10], 2, 3), ([5, 7], 1, 3), ([8, 4], 1, 2)] {
                let x = leaves(&device, &[[5, 35, channels[0]]], 1).remove(0);
                if !super::super::cube::is_cube(&x) {
                    continue;
                }
                let shape = [channels[1], channels[0] / n_groups, kernel, kernel];
                let weight = leaves(&device, &[shape], 2).remove(0);
                let geometry = Geometry::new(5, [5, 7], [kernel; 2], 2, 1);
                let kernel = cube_kernel(&geometry, n_groups, Some(2));
                let y: Tensor<3> = run(kernel, [x.clone().into(), weight.clone().into()]);
                let kernel = cube_kernel(&geometry, n_groups, None);
                let expected: Tensor<3> = run(kernel, [x.clone().into(), weight.clone().into()]);
                assert_close("forward", y.clone().inner(), expected.clone().inner(), 1e-6);
                let grads = backward(y);
                let expected = backward(expected);
                assert_gradients_close("input", &x, &grads, &expected, 1e-6);
                assert_gradients_close("weight", &weight, &grads, &expected, 1e-5);
            }
        }
    }
}
