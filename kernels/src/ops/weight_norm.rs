//! A linear map whose rows are directions with a separate length (Salimans and Kingma 2016).
//!
//! ```text
//! y  = x · (g ⊙ v / |v|)ᵀ           x [M, D]  v [K, D]  g [K]  y [M, K]
//! c  = g / |v|        h = ∂y ⊙ c
//! ∂x = h · v          ∂v = hᵀ · x - v ⊙ (Σ_M ∂y ⊙ y) / |v|²        ∂g = (Σ_M ∂y ⊙ y) / g
//! ```

use burn_flex::{Flex, FlexTensor};
use burn_tensor::Tensor;
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cpu::{contiguous, dims, is_flex, owned, slice, slice_mut, tensor};
use super::gemm::{Mat, gemm};
use super::linear::matmul_transposed;
use super::math::{lane_dot, over_rows};

/// Returns `x · (gain ⊙ v / |v|)ᵀ`. No row of `v` may be zero, nor any `gain` that has a gradient.
pub fn weight_norm_linear(x: Tensor<2>, v: Tensor<2>, gain: Tensor<1>) -> Tensor<2> {
    if is_flex(&x) { run(WeightNorm, [x.into(), v.into(), gain.into()]) } else { plain(x, v, gain) }
}

fn plain(x: Tensor<2>, v: Tensor<2>, gain: Tensor<1>) -> Tensor<2> {
    let lengths = v.clone().powi_scalar(2).sum_dim(1).sqrt();
    let factors = gain.unsqueeze() / lengths.transpose();
    matmul_transposed(x, v) * factors
}

#[derive(Debug, Clone)]
struct WeightNorm;

impl Kernel<Flex, 3> for WeightNorm {
    /// x, v, gain, the factors c, and y.
    type Saved = [FlexTensor; 5];

    fn forward(&self, [x, v, gain]: [FlexTensor; 3]) -> (FlexTensor, Self::Saved) {
        let [m, d]: [usize; 2] = dims(&x);
        let [k, _]: [usize; 2] = dims(&v);
        let x = contiguous(&x);
        let v = contiguous(&v);
        let gain = contiguous(&gain);
        let mut factors = vec![0.0; k];
        let lengths = slice(&gain);
        let rows = slice(&v);
        over_rows(&mut factors, 1, |first, factors| {
            inverse_lengths(&rows[first * d..], &lengths[first..], factors, d);
        });
        let mut y = vec![0.0; m * k];
        gemm([m, d, k], 1.0, Mat::rows(slice(&x), d), Mat::rows(slice(&v), d).t(), 0.0, &mut y, k);
        over_rows(&mut y, k, |_, rows| scale_columns(rows, &factors));
        let y = tensor(y, [m, k]);
        (y.clone(), [x, v, gain, tensor(factors, [k]), y])
    }

    fn backward(
        &self,
        [x, v, gain, factors, y]: Self::Saved,
        grad: FlexTensor,
        wanted: [bool; 3],
    ) -> [Option<FlexTensor>; 3] {
        let [m, k]: [usize; 2] = dims(&grad);
        let [_, d]: [usize; 2] = dims(&v);
        // Σ_M ∂y ⊙ y.
        let mut dots = vec![0.0; k];
        let mut h = owned(grad);
        if wanted[1] || wanted[2] {
            column_dots(slice(&h), slice(&y), &mut dots);
        }
        // The output may be as large as all of the weights.
        drop(y);
        over_rows(slice_mut(&mut h), k, |_, rows| scale_columns(rows, slice(&factors)));
        let h = slice(&h);
        let gx = wanted[0].then(|| {
            let mut gx = vec![0.0; m * d];
            gemm([m, k, d], 1.0, Mat::rows(h, k), Mat::rows(slice(&v), d), 0.0, &mut gx, d);
            tensor(gx, [m, d])
        });
        let gv = wanted[1].then(|| {
            let mut gv = vec![0.0; k * d];
            gemm([k, m, d], 1.0, Mat::rows(h, k).t(), Mat::rows(slice(&x), d), 0.0, &mut gv, d);
            over_rows(&mut gv, d, |first, rows| {
                let range = first..first + rows.len() / d;
                remove_radial(rows, &slice(&v)[first * d..], &dots[range], d);
            });
            tensor(gv, [k, d])
        });
        let ggain = wanted[2].then(|| {
            let ratios = dots.iter().zip(slice(&gain)).map(|(dot, gain)| dot / gain);
            tensor(ratios.collect(), [k])
        });
        [gx, gv, ggain]
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn inverse_lengths(v: &[f32], gain: &[f32], factors: &mut [f32], d: usize) {
    for ((factor, v), gain) in factors.iter_mut().zip(v.chunks_exact(d)).zip(gain) {
        *factor = gain / lane_dot(v, v).sqrt();
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn scale_columns(rows: &mut [f32], factors: &[f32]) {
    for row in rows.chunks_exact_mut(factors.len()) {
        for (value, factor) in row.iter_mut().zip(factors) {
            *value *= factor;
        }
    }
}

/// Adds the sum over rows of `a ⊙ b` to `sums`.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn column_dots(a: &[f32], b: &[f32], sums: &mut [f32]) {
    let k = sums.len();
    for (a, b) in a.chunks_exact(k).zip(b.chunks_exact(k)) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
}

/// Removes the component along `v` from the gradients of `v`: the rest changes the direction of a
/// row but not its length.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn remove_radial(gv: &mut [f32], v: &[f32], dots: &[f32], d: usize) {
    for ((gv, v), dot) in gv.chunks_exact_mut(d).zip(v.chunks_exact(d)).zip(dots) {
        let factor = dot / lane_dot(v, v);
        for (gv, v) in gv.iter_mut().zip(v) {
            *gv -= v * factor;
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
            let x = leaves(&device, &[[5, 19]], 1).remove(0);
            let v = leaves(&device, &[[33, 19]], 2).remove(0);
            let gain = leaves(&device, &[[33]], 3).remove(0);
            let y = weight_norm_linear(x.clone(), v.clone(), gain.clone());
            let expected = plain(x.clone(), v.clone(), gain.clone());
            assert_close("forward", y.clone().inner(), expected.clone().inner(), 5e-6);
            let grads = backward_cubed(y);
            let expected = backward_cubed(expected);
            assert_gradients_close("x", &x, &grads, &expected, 5e-6);
            assert_gradients_close("v", &v, &grads, &expected, 5e-6);
            assert_gradients_close("gain", &gain, &grads, &expected, 5e-6);
        }
    }

    /// Runs the backward pass from `y`, whose gradient is `y³`.
    fn backward_cubed(y: Tensor<2>) -> Gradients {
        (y.clone() * y.inner().autodiff().powi_scalar(3)).sum().backward()
    }
}
