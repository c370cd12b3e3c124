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
    /// The rows, each followed by its factor: `[M, D + 1]`.
    type Saved = FlexTensor;

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, FlexTensor) {
        let [m, d]: [usize; 2] = dims(&x);
        let x = contiguous(&x);
        let mut kept = vec![0.0; m * (d + 1)];
        over_rows(&mut kept, d + 1, |first, rows| forward(&slice(&x)[first * d..], rows, d, self.epsilon));
        let y = kept.chunks_exact(d + 1).flat_map(|row| &row[..d]).copied().collect();
        (tensor(y, [m, d]), tensor(kept, [m, d + 1]))
    }

    fn backward(&self, kept: FlexTensor, grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let [m, d]: [usize; 2] = dims(&grad);
        let grad = contiguous(&grad);
        let mut gx = vec![0.0; m * d];
        over_rows(&mut gx, d, |first, rows| {
            backward(&slice(&kept)[first * (d + 1)..], &slice(&grad)[first * d..], rows, d);
        });
        [Some(tensor(gx, [m, d]))]
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn forward(x: &[f32], kept: &mut [f32], d: usize, epsilon: f32) {
    for (x, kept) in x.chunks_exact(d).zip(kept.chunks_exact_mut(d + 1)) {
        let factor = 1.0 / (lane_dot(x, x) + epsilon).sqrt();
        for (y, x) in kept.iter_mut().zip(x) {
            *y = x * factor;
        }
        kept[d] = factor;
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn backward(kept: &[f32], grad: &[f32], gx: &mut [f32], d: usize) {
    for ((kept, grad), gx) in kept.chunks_exact(d + 1).zip(grad.chunks_exact(d)).zip(gx.chunks_exact_mut(d)) {
        let along = lane_dot(&kept[..d], grad);
        for ((gx, y), grad) in gx.iter_mut().zip(kept).zip(grad) {
            *gx = (grad - y * along) * kept[d];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::twin::{assert_close, devices, leaves};

    #[test]
    fn it_equals_its_twin_forwards_and_backwards() {
        for device in devices() {
            let x = leaves(&device, &[[9, 37]], 1).remove(0);
            let run = |f: fn(Tensor<2>, f64) -> Tensor<2>| {
                let y = f(x.clone(), 1e-12);
                let grads = (y.clone() * y.clone().inner().autodiff().powi_scalar(3)).sum().backward();
                (y.inner(), x.grad(&grads).unwrap())
            };
            let a = run(unit_rows);
            let b = run(plain);
            assert_close("forward", a.0, b.0, 1e-6);
            assert_close("input", a.1, b.1, 3e-6);
        }
    }
}
