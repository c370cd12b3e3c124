//! Max pooling: the largest number of each window, by channel.
//!
//! ```text
//! y[b, i, c] = max_t x[b, s·i + t - p, c]      over the taps t inside the grid
//! gx         = g at the first largest tap of its window, summed over windows
//! ```

use burn_flex::{Flex, FlexTensor};
use burn_tensor::Tensor;
use burn_tensor::module::max_pool2d;
use burn_tensor::ops::MaxPoolOptions;

use super::Window;
use super::geometry::Geometry;
use crate::ops::bridge::{Kernel, run};
use crate::ops::cpu::{contiguous, dims, is_flex, slice, tensor};

/// Returns the largest of `x` of `[B, H·W, C]` in windows of `side` by `side` cells, `[B, H'·W', C]`, and its grid.
/// Padding is at most half a window, so that each window has a cell inside.
pub fn max_pool(x: Tensor<3>, grid: [usize; 2], side: usize, window: Window) -> (Tensor<3>, [usize; 2]) {
    let [b, _, _] = x.dims();
    let geometry = Geometry::new(b, grid, [side; 2], window.stride, window.padding);
    let y = match is_flex(&x) {
        true => run(MaxPool { geometry }, [x.into()]),
        false => plain(x, &geometry),
    };
    (y, geometry.output)
}

fn plain(x: Tensor<3>, geometry: &Geometry) -> Tensor<3> {
    let [b, _, c] = x.dims();
    let ([h, w], [rows, columns]) = (geometry.input, geometry.output);
    let x = x.reshape([b, h, w, c]).permute([0, 3, 1, 2]);
    let options = MaxPoolOptions::new(geometry.kernel);
    let options = options.with_stride([geometry.stride; 2]).with_padding(geometry.padding);
    max_pool2d(x, options).permute([0, 2, 3, 1]).reshape([b, rows * columns, c])
}

#[derive(Debug, Clone)]
struct MaxPool {
    geometry: Geometry,
}

impl Kernel<Flex, 1> for MaxPool {
    type Saved = FlexTensor;

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, FlexTensor) {
        let x = contiguous(&x);
        let [_, _, c]: [usize; 3] = dims(&x);
        let mut y = vec![f32::NEG_INFINITY; self.geometry.n_windows() * c];
        let values = slice(&x);
        self.geometry.for_each_row(0..self.geometry.n_windows(), |window, tap, n| {
            let y = &mut y[window * c..(window + 1) * c];
            for cell in values[tap.cell * c..(tap.cell + n) * c].chunks_exact(c) {
                // NaN propagates.
                y.iter_mut().zip(cell).for_each(|(y, x)| *y = if *x > *y || x.is_nan() { *x } else { *y });
            }
        });
        let [rows, columns] = self.geometry.output;
        (tensor(y, [self.geometry.n_images, rows * columns, c]), x)
    }

    fn backward(&self, x: FlexTensor, grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let [_, _, c]: [usize; 3] = dims(&x);
        let (values, grad) = (slice(&x), contiguous(&grad));
        let grad = slice(&grad);
        let mut best = vec![(f32::NEG_INFINITY, 0); self.geometry.n_windows() * c];
        self.geometry.for_each_row(0..self.geometry.n_windows(), |window, tap, n| {
            let best = &mut best[window * c..(window + 1) * c];
            for cell in tap.cell..tap.cell + n {
                for (best, x) in best.iter_mut().zip(&values[cell * c..(cell + 1) * c]) {
                    if *x > best.0 || x.is_nan() {
                        *best = (*x, cell);
                    }
                }
            }
        });
        let mut gx = vec![0.0; values.len()];
        for (i, ((_, cell), grad)) in best.iter().zip(grad).enumerate() {
            gx[cell * c + i % c] += grad;
        }
        [Some(tensor(gx, dims::<3>(&x)))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::twin::{assert_close, devices, leaves};

    #[test]
    fn it_equals_its_twin_forwards_and_backwards() {
        for device in devices() {
            for (grid, side, stride, padding) in
                [([7, 6], 3, 2, 1), ([8, 8], 2, 2, 0), ([1, 1], 3, 2, 1), ([5, 4], 3, 1, 1)]
            {
                let x = leaves(&device, &[[2, grid[0] * grid[1], 5]], 1).remove(0);
                let window = Window { stride, padding };
                let (y, _) = max_pool(x.clone(), grid, side, window);
                let twin = plain(x.clone(), &Geometry::new(2, grid, [side; 2], stride, padding));
                assert_close("forward", y.clone().inner(), twin.clone().inner(), 0.0);
                let gradient = |y: Tensor<3>| {
                    let grads = (y.clone() * y.inner().autodiff()).sum().backward();
                    x.grad(&grads).expect("leaf")
                };
                assert_close("input", gradient(y), gradient(twin), 1e-6);
            }
        }
    }
}
