//! Max pooling: the largest number of each window in every channel.
//!
//! ```text
//! y[b, i, c] = max_t x[b, s·i + t - p, c]      over the taps t inside the grid
//! gx         = g at the first largest tap of its window, summed over windows
//! ```

use std::marker::PhantomData;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::module::max_pool2d;
use burn_tensor::ops::MaxPoolOptions;
use burn_tensor::{DType, Tensor};
use half::bf16;

use super::Window;
use super::geometry::Geometry;
use crate::ops::bridge::{Kernel, run};
use crate::ops::cpu::{contiguous, dims, elements, flex_dtype, tensor};
use crate::ops::number::{Number, nearest};

/// Returns the largest numbers of `x` of `[B, H·W, C]` in windows of `side` by `side` cells, `[B,
/// H'·W', C]`, and their grid. Padding is at most half a window, so that each window has a cell
/// inside the grid.
pub fn max_pool(x: Tensor<3>, grid: [usize; 2], side: usize, window: Window) -> (Tensor<3>, [usize; 2]) {
    let [b, _, _] = x.dims();
    let geometry = Geometry::new(b, grid, [side; 2], window.stride, window.padding);
    let y = match flex_dtype(&x) {
        Some(DType::F32) => run(MaxPool::<f32> { geometry, numbers: PhantomData }, [x.into()]),
        Some(DType::BF16) => run(MaxPool::<bf16> { geometry, numbers: PhantomData }, [x.into()]),
        _ => plain(x, &geometry),
    };
    (y, geometry.output)
}

fn plain(x: Tensor<3>, geometry: &Geometry) -> Tensor<3> {
    let [b, _, c] = x.dims();
    let [h, w] = geometry.input;
    let [rows, columns] = geometry.output;
    let x = x.reshape([b, h, w, c]).permute([0, 3, 1, 2]);
    let options = MaxPoolOptions::new(geometry.kernel);
    let options = options.with_stride([geometry.stride; 2]).with_padding(geometry.padding);
    max_pool2d(x, options).permute([0, 2, 3, 1]).reshape([b, rows * columns, c])
}

/// Kernel for features with elements of type `T`.
#[derive(Debug, Clone)]
struct MaxPool<T> {
    geometry: Geometry,
    numbers: PhantomData<T>,
}

impl<T: Number> Kernel<Flex, 1> for MaxPool<T> {
    type Saved = FlexTensor;

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, FlexTensor) {
        let x = contiguous(&x);
        let [_, _, c]: [usize; 3] = dims(&x);
        let mut y = vec![T::nearest(f32::NEG_INFINITY); self.geometry.n_windows() * c];
        let values = elements::<T>(&x);
        self.geometry.for_each_row(0..self.geometry.n_windows(), |window, tap, n| {
            let y = &mut y[window * c..(window + 1) * c];
            for cell in values[tap.cell * c..(tap.cell + n) * c].chunks_exact(c) {
                // NaN propagates.
                for (y, x) in y.iter_mut().zip(cell) {
                    *y = if x.wide() > y.wide() || x.wide().is_nan() { *x } else { *y };
                }
            }
        });
        let [rows, columns] = self.geometry.output;
        (tensor(y, [self.geometry.n_images, rows * columns, c]), x)
    }

    fn backward(&self, x: FlexTensor, grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let [_, _, c]: [usize; 3] = dims(&x);
        let values = elements::<T>(&x);
        let grad = contiguous(&grad);
        let grad = elements::<T>(&grad);
        let mut best = vec![(f32::NEG_INFINITY, 0); self.geometry.n_windows() * c];
        self.geometry.for_each_row(0..self.geometry.n_windows(), |window, tap, n| {
            let best = &mut best[window * c..(window + 1) * c];
            for cell in tap.cell..tap.cell + n {
                for (best, x) in best.iter_mut().zip(&values[cell * c..(cell + 1) * c]) {
                    let x = x.wide();
                    if x > best.0 || x.is_nan() {
                        *best = (x, cell);
                    }
                }
            }
        });
        let mut gx = vec![0.0; values.len()];
        for (i, ((_, cell), grad)) in best.iter().zip(grad).enumerate() {
            gx[cell * c + i % c] += grad.wide();
        }
        [Some(tensor(nearest::<T>(gx), dims::<3>(&x)))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, assert_gradients_close, backward, devices, leaves, types};
    use crate::ops::{cast, in_f32};

    #[test]
    fn matches_plain_forward_and_backward() {
        for device in devices() {
            for (grid, side, stride, padding) in
                [([7, 6], 3, 2, 1), ([8, 8], 2, 2, 0), ([1, 1], 3, 2, 1), ([5, 4], 3, 1, 1)]
            {
                let x = leaves(&device, &[[2, grid[0] * grid[1], 5]], 1).remove(0);
                for (dtype, tolerance) in types(&device, 1e-6) {
                    let window = Window { stride, padding };
                    let (y, _) = max_pool(cast(x.clone(), dtype), grid, side, window);
                    assert_eq!(y.dtype(), dtype);
                    // The reference is computed in f32: among numbers that rounding makes equal, a
                    // library may choose another one.
                    let geometry = Geometry::new(2, grid, [side; 2], stride, padding);
                    let expected = plain(in_f32(cast(x.clone(), dtype)), &geometry);
                    assert_close("forward", y.clone().inner(), expected.clone().inner(), 0.0);
                    let grads = backward(in_f32(y));
                    assert_gradients_close("input", &x, &grads, &backward(expected), tolerance);
                }
            }
        }
    }
}
