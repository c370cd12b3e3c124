//! Convolution over the grid of features, with channels last.
//!
//! ```text
//! y[b, i, o] = Σ_t,c w[o, c, t] · x[b, s·i + t - p, c]      i a window, t its taps, c the channels of o's group
//! gx[b, j, c] = Σ_t,o w[o, c, t] · g[b, i, o]               where s·i + t - p = j
//! gw[o, c, t] = Σ_b,i g[b, i, o] · x[b, s·i + t - p, c]
//! ```
//!
//! x `[B, H·W, C]`, w `[O, C/G, kh, kw]` as PyTorch stores it, y `[B, H'·W', O]` with
//! `H' = ⌊(H + 2p - kh) / s⌋ + 1`; x is zero outside its grid.

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

use self::channels::{Channels, packed, unpacked};
use self::geometry::Geometry;
use super::bridge::{Kernel, run};
use super::cast::cast;
use super::cpu::{contiguous, dims, elements, flex_dtype, tensor};
use super::linear;
use super::number::Number;
use super::weights::Weights;

/// Spacing of windows.
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

/// Convolves `x` of `[B, H·W, C]` on `grid` with `weight` of `[O, C/G, kh, kw]`; returns `[B,
/// H'·W', O]` and its grid. The weight is f32 if `x` is f32, and f32 or bf16 if it is bf16; its
/// gradient is f32.
pub fn conv(x: Tensor<3>, grid: [usize; 2], weight: Tensor<4>, window: Window) -> (Tensor<3>, [usize; 2]) {
    let [b, _, c] = x.dims();
    let [_, of_group, kh, kw] = weight.dims();
    let geometry = Geometry::new(b, grid, [kh, kw], window.stride, window.padding);
    let groups = c / of_group;
    #[cfg(feature = "cube")]
    if super::cube::is_cube(&x) {
        let kernel = on_cube(&geometry, groups, None);
        return (run(kernel, [x.into(), weight.into()]), geometry.output);
    }
    let y = match flex_dtype(&x) {
        Some(DType::F32) => run(Conv::<f32>::new(geometry, groups), [x.into(), weight.into()]),
        Some(DType::BF16) => run(Conv::<bf16>::new(geometry, groups), [x.into(), weight.into()]),
        _ => plain(x, weight, &geometry),
    };
    (y, geometry.output)
}

/// Returns the kernel for GPUs; `chunk_len` limits the images of which windows are copied at a
/// time.
#[cfg(feature = "cube")]
fn on_cube(geometry: &Geometry, n_groups: usize, chunk_len: Option<usize>) -> super::cube::Conv {
    let pair = |sides: [usize; 2]| (sides[0], sides[1]);
    let windows = super::cube::Windows {
        input: pair(geometry.input),
        output: pair(geometry.output),
        kernel: pair(geometry.kernel),
        stride: geometry.stride,
        padding: geometry.padding[0],
    };
    let is_linear = n_groups == 1 && geometry.is_pointwise();
    super::cube::Conv { windows, n_groups, is_linear, chunk_len }
}

/// Computes it with Burn's `conv2d`.
fn plain(x: Tensor<3>, weight: Tensor<4>, geometry: &Geometry) -> Tensor<3> {
    let [b, _, c] = x.dims();
    let [o, of_group, _, _] = weight.dims();
    let [h, w] = geometry.input;
    let [rows, columns] = geometry.output;
    let x = x.reshape([b, h, w, c]).permute([0, 3, 1, 2]);
    let options = ConvOptions::new([geometry.stride; 2], geometry.padding, [1, 1], c / of_group);
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

    /// Returns whether the convolution is a product of the cells with the weight as it is stored.
    fn is_linear(&self) -> bool {
        self.groups == 1 && self.geometry.is_pointwise()
    }

    /// Returns the sizes of this product: cells, input and output channels.
    fn sizes(&self, channels: Channels) -> [usize; 3] {
        [self.geometry.n_cells(), channels.input, channels.output]
    }

    fn channels(&self, x: &FlexTensor, weight: &FlexTensor) -> Channels {
        let ([_, _, input], [output, ..]): ([usize; 3], [usize; 4]) = (dims(x), dims(weight));
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
        let y = match Weights::of(&weight) {
            weight if self.is_linear() => linear::times_transposed(values, weight, self.sizes(channels)),
            Weights::Wide(weight) => {
                cpu::forward(values, &packed(weight, channels, n_taps), channels, &self.geometry)
            }
            Weights::Narrow(weight) => {
                cpu::forward(values, &packed(weight, channels, n_taps), channels, &self.geometry)
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
            let gx = match Weights::of(&weight) {
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
                unpacked(&packed, channels, self.geometry.n_taps())
            };
            tensor(gw, dims::<4>(&weight))
        });
        [gx, gw]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::twin::{assert_close, devices, leaves, types};

    /// Images, grid, channels in and out, groups, kernel, stride, padding.
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
    fn it_equals_its_twin_forwards_and_backwards() {
        for device in devices() {
            let types = types(&device, 1e-5);
            let cases = types.iter().flat_map(|of_type| CASES.map(|case| (of_type, case)));
            for ((dtype, tolerance), (b, grid, [c, o], groups, [kh, kw], stride, padding)) in cases {
                let x = leaves(&device, &[[b, grid[0] * grid[1], c]], 1).remove(0);
                let weight = leaves(&device, &[[o, c / groups, kh, kw]], 2).remove(0);
                let window = Window { stride, padding };
                let (y, output) = conv(cast(x.clone(), *dtype), grid, weight.clone(), window);
                if *dtype == DType::BF16 {
                    let narrow = conv(cast(x.clone(), *dtype), grid, cast(weight.clone(), *dtype), window).0;
                    narrow.into_data().assert_eq(&y.clone().into_data(), true);
                }
                assert_eq!(y.dtype(), *dtype);
                assert_eq!(output, [window.output(grid[0], kh), window.output(grid[1], kw)]);
                let geometry = Geometry::new(b, grid, [kh, kw], stride, padding);
                let twin = plain(cast(x.clone(), *dtype), weight.clone(), &geometry);
                assert_close("forward", y.clone().inner(), twin.clone().inner(), *tolerance);
                let gradients = |y: Tensor<3>| {
                    let grads = (y.clone() * y.inner().autodiff()).sum().backward();
                    (x.grad(&grads).expect("leaf"), weight.grad(&grads).expect("leaf"))
                };
                let a = gradients(y);
                let t = gradients(twin);
                assert_close("input", a.0, t.0, *tolerance);
                assert_eq!(a.1.dtype(), DType::F32);
                assert_close("weight", a.1, t.1, *tolerance);
            }
        }
    }

    /// More windows than a block holds.
    #[test]
    fn blocks_do_not_show() {
        let geometry = Geometry::new(3, [64, 64], [3, 3], 1, 1);
        let channels = Channels { input: 16, output: 4, groups: 1 };
        let value = |i: usize| (i as f32 * 0.37).sin();
        let x: Vec<f32> = (0..geometry.n_cells() * 16).map(value).collect();
        let packed: Vec<f32> = (0..9 * 16 * 4).map(value).collect();
        let all = cpu::forward(&x, &packed, channels, &geometry);
        let one = Geometry { n_images: 1, ..geometry };
        for image in 0..3 {
            let own = cpu::forward(&x[image * 65_536..(image + 1) * 65_536], &packed, channels, &one);
            let of_all = &all[image * own.len()..(image + 1) * own.len()];
            assert!(own.iter().zip(of_all).all(|(a, b)| (a - b).abs() <= 1e-5));
        }
        let grad: Vec<f32> = (0..geometry.n_windows() * 4).map(value).collect();
        let of_all = cpu::weight_gradient(&x, &grad, channels, &geometry);
        let mut sum = vec![0.0; of_all.len()];
        for image in 0..3 {
            let x = &x[image * 65_536..];
            let grad = &grad[image * 16_384..(image + 1) * 16_384];
            let own = cpu::weight_gradient(x, grad, channels, &one);
            sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
        }
        assert!(sum.iter().zip(&of_all).all(|(a, b)| (a - b).abs() <= 1e-3), "sums of some thousand sines");
    }

    /// On a GPU, a batch whose windows do not fit at once is convolved in parts of the same images,
    /// forwards and backwards, whichever side is wider.
    #[cfg(feature = "cube")]
    #[test]
    fn parts_of_a_batch_make_the_whole() {
        for device in devices() {
            for (channels, n_groups, kernel) in [([6, 10], 2, 3), ([5, 7], 1, 3), ([8, 4], 1, 2)] {
                let x = leaves(&device, &[[5, 35, channels[0]]], 1).remove(0);
                if !super::super::cube::is_cube(&x) {
                    continue;
                }
                let shape = [channels[1], channels[0] / n_groups, kernel, kernel];
                let weight = leaves(&device, &[shape], 2).remove(0);
                let geometry = Geometry::new(5, [5, 7], [kernel; 2], 2, 1);
                let results = |chunk_len: Option<usize>| {
                    let kernel = on_cube(&geometry, n_groups, chunk_len);
                    let y: Tensor<3> = run(kernel, [x.clone().into(), weight.clone().into()]);
                    let grads = (y.clone() * y.clone().inner().autodiff()).sum().backward();
                    (y.inner(), x.grad(&grads).unwrap(), weight.grad(&grads).unwrap())
                };
                let whole = results(None);
                let parts = results(Some(2));
                assert_close("forward", parts.0, whole.0, 1e-6);
                assert_close("input", parts.1, whole.1, 1e-6);
                assert_close("weight", parts.2, whole.2, 1e-5);
            }
        }
    }
}
