//! Rows scaled to unit length.
//!
//! ```text
//! y = x · r      r = 1 / √(|x|² + ε)       x, y [M, D]
//! gx = r · (g - y (y · g))
//! ```

use burn_flex::{Flex, FlexTensor};
use burn_tensor::Tensor;
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cpu::{contiguous, dims, is_flex, slice, tensor};
use super::math::{lane_dot, over_rows};

/// Epsilon of [`unit_rows`] in embeddings and prototypes, that of PyTorch's `normalize`.
pub const NORM_EPSILON: f64 = 1e-12;

/// Scales the rows of `x` to unit length; `epsilon` keeps a row of zeros finite.
pub fn unit_rows(x: Tensor<2>, epsilon: f64) -> Tensor<2> {
    #[cfg(feature = "cube")]
    if super::cube::is_cube(&x) {
        return run(super::cube::UnitRows { epsilon: epsilon as f32 }, [x.into()]);
    }
    if is_flex(&x) { run(UnitRows { epsilon: epsilon as f32 }, [x.into()]) } else { plain(x, epsilon) }
}

fn plain(x: Tensor<2>, epsilon: f64) -> Tensor<2> {
    let norm = (x.clone().powi_scalar(2).sum_dim(1) + epsilon).sqrt();
    x / norm
}

#[derive(Debug, Clone)]
struct UnitRows {
    epsilon: f32,
}

impl Kernel<Flex, 1> for UnitRows {
    /// The scaled rows, each followed by its factor: `[M, D + 1]`.
    type Saved = FlexTensor;

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, FlexTensor) {
        let [m, d]: [usize; 2] = dims(&x);
        let x = contiguous(&x);
        let mut saved = vec![0.0; m * (d + 1)];
        over_rows(&mut saved, d + 1, |first, rows| forward(&slice(&x)[first * d..], rows, d, self.epsilon));
        let y = saved.chunks_exact(d + 1).flat_map(|row| &row[..d]).copied().collect();
        (tensor(y, [m, d]), tensor(saved, [m, d + 1]))
    }

    fn backward(&self, saved: FlexTensor, grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let [m, d]: [usize; 2] = dims(&grad);
        let grad = contiguous(&grad);
        let mut gx = vec![0.0; m * d];
        over_rows(&mut gx, d, |first, rows| {
            backward(&slice(&saved)[first * (d + 1)..], &slice(&grad)[first * d..], rows, d);
        });
        [Some(tensor(gx, [m, d]))]
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn forward(x: &[f32], saved: &mut [f32], d: usize, epsilon: f32) {
    for (x, saved) in x.chunks_exact(d).zip(saved.chunks_exact_mut(d + 1)) {
        let factor = 1.0 / (lane_dot(x, x) + epsilon).sqrt();
        for (y, x) in saved.iter_mut().zip(x) {
            *y = x * factor;
        }
        saved[d] = factor;
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn backward(saved: &[f32], grad: &[f32], gx: &mut [f32], d: usize) {
    for ((saved, grad), gx) in saved.chunks_exact(d + 1).zip(grad.chunks_exact(d)).zip(gx.chunks_exact_mut(d))
    {
        let projection = lane_dot(&saved[..d], grad);
        for ((gx, y), grad) in gx.iter_mut().zip(saved).zip(grad) {
            *gx = (grad - y * projection) * saved[d];
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::Gradients;

    use super::*;
    use crate::ops::testing::{assert_close, assert_gradients_close, devices, leaves};

    #[test]
    fn matches_plain_forward_and_backward() {
        for device in devices() {
            let x = leaves(&device, &[[9, 37]], 1).remove(0);
            let y = unit_rows(x.clone(), 1e-12);
            let expected = plain(x.clone(), 1e-12);
            assert_close("forward", y.clone().inner(), expected.clone().inner(), 1e-6);
            assert_gradients_close("input", &x, &backward_cubed(y), &backward_cubed(expected), 3e-6);
        }
    }

    /// Runs the backward pass from `y`, whose gradient is `y³`: the gradient `y` itself would give
    /// zeros.
    fn backward_cubed(y: Tensor<2>) -> Gradients {
        (y.clone() * y.inner().autodiff().powi_scalar(3)).sum().backward()
    }
}
