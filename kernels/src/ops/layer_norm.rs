//! Layer normalization over the last dimension (Ba et al. 2016).
//!
//! ```text
//! x̂  = (x - mean(x)) · r          r = 1 / √(var(x) + ε), moments over D
//! y  = x̂ · γ + β
//! gx = r · (h - mean(h) - x̂ · mean(h · x̂))   with h = g · γ
//! gγ = Σ_rows g · x̂               gβ = Σ_rows g
//! ```

use burn_flex::Flex;
use burn_flex::FlexTensor;
use burn_tensor::Tensor;
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cpu::{add, contiguous, is_flex, like, rows_and_length, slice, tensor};
#[cfg(feature = "cube")]
use super::cube;
use super::link::Link;
use super::math::{lane_dot, lane_sum, over_rows};

/// Normalizes `x` of `[.., D]` over `D`, with `gamma` and `beta` of `[D]`.
pub fn layer_norm<const R: usize>(
    x: Tensor<R>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    epsilon: f64,
) -> Tensor<R> {
    #[cfg(feature = "cube")]
    if cube::is_cube(&x) {
        let norm = cube::LayerNorm { epsilon: epsilon as f32, output: x.dtype(), link: None };
        return run(norm, [x.into(), gamma.into(), beta.into()]);
    }
    if is_flex(&x) {
        let kernel = LayerNorm { epsilon: epsilon as f32, link: None };
        run(kernel, [x.into(), gamma.into(), beta.into()])
    } else {
        plain(x, gamma, beta, epsilon)
    }
}

/// Computes [`layer_norm`] on the CPU; the backward pass adds the gradient stored in `link` to the
/// gradient of `x`.
pub(super) fn with_link<const R: usize>(
    x: Tensor<R>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    epsilon: f64,
    link: Link<FlexTensor>,
) -> Tensor<R> {
    let kernel = LayerNorm { epsilon: epsilon as f32, link: Some(link) };
    run(kernel, [x.into(), gamma.into(), beta.into()])
}

/// Computes in the type of γ, for any type of `x`.
fn plain<const R: usize>(x: Tensor<R>, gamma: Tensor<1>, beta: Tensor<1>, epsilon: f64) -> Tensor<R> {
    let dtype = x.dtype();
    let wide = gamma.dtype();
    let x = x.cast(wide);
    let gamma = gamma.unsqueeze::<R>().cast(wide);
    let beta = beta.unsqueeze::<R>().cast(wide);
    let (var, mean) = x.clone().var_mean_bias(R - 1);
    ((x - mean) / (var + epsilon).sqrt() * gamma + beta).cast(dtype)
}

#[derive(Debug, Clone)]
struct LayerNorm {
    epsilon: f32,
    link: Option<Link<FlexTensor>>,
}

/// Normalized rows, each followed by its factor, `[rows, D + 1]`; γ; β.
type Saved = (FlexTensor, FlexTensor, FlexTensor);

impl Kernel<Flex, 3> for LayerNorm {
    type Saved = Saved;

    fn forward(&self, [x, gamma, beta]: [FlexTensor; 3]) -> (FlexTensor, Saved) {
        let (n_rows, d) = rows_and_length(&x);
        let x = contiguous(&x);
        let gamma = contiguous(&gamma);
        let beta = contiguous(&beta);
        // One buffer for rows and factors, so that both are split over threads in one call.
        let mut kept = vec![0.0; n_rows * (d + 1)];
        over_rows(&mut kept, d + 1, |first, rows| {
            normalize(&slice(&x)[first * d..], rows, d, self.epsilon);
        });
        let mut y = vec![0.0; n_rows * d];
        over_rows(&mut y, d, |first, rows| {
            scale_shift(&kept[first * (d + 1)..], slice(&gamma), slice(&beta), rows);
        });
        let kept = tensor(kept, [n_rows, d + 1]);
        (like(&x, y), (kept, gamma, beta))
    }

    fn backward(&self, saved: Saved, grad: FlexTensor, wanted: [bool; 3]) -> [Option<FlexTensor>; 3] {
        let (_, d) = rows_and_length(&grad);
        let contiguous_grad = contiguous(&grad);
        let (kept, gamma, _) = saved;
        let grad = slice(&contiguous_grad);
        let kept = slice(&kept);
        let skip = self.link.as_ref().and_then(Link::take).map(|skip| contiguous(&skip));
        let gx = wanted[0].then(|| {
            let mut gx = vec![0.0; grad.len()];
            over_rows(&mut gx, d, |first, rows| {
                input_gradient(&kept[first * (d + 1)..], slice(&gamma), &grad[first * d..], rows);
                if let Some(skip) = &skip {
                    add(rows, &slice(skip)[first * d..]);
                }
            });
            like(&contiguous_grad, gx)
        });
        let mut g_gamma = vec![0.0; d];
        let mut g_beta = vec![0.0; d];
        if wanted[1] || wanted[2] {
            parameter_gradients(kept, grad, &mut g_gamma, &mut g_beta);
        }
        [gx, wanted[1].then(|| tensor(g_gamma, [d])), wanted[2].then(|| tensor(g_beta, [d]))]
    }
}

/// Writes each normalized row, followed by its factor, to the rows of `kept`.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn normalize(x: &[f32], kept: &mut [f32], d: usize, epsilon: f32) {
    for (row, kept) in x.chunks_exact(d).zip(kept.chunks_exact_mut(d + 1)) {
        let mean = lane_sum(row, |v| v) / d as f32;
        let variance = lane_sum(row, |v| (v - mean) * (v - mean)) / d as f32;
        let factor = 1.0 / (variance + epsilon).sqrt();
        for (out, value) in kept.iter_mut().zip(row) {
            *out = (value - mean) * factor;
        }
        kept[d] = factor;
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn scale_shift(kept: &[f32], gamma: &[f32], beta: &[f32], y: &mut [f32]) {
    let d = gamma.len();
    for (row, y) in kept.chunks_exact(d + 1).zip(y.chunks_exact_mut(d)) {
        for (((y, x), gamma), beta) in y.iter_mut().zip(row).zip(gamma).zip(beta) {
            *y = x * gamma + beta;
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn input_gradient(kept: &[f32], gamma: &[f32], grad: &[f32], gx: &mut [f32]) {
    let d = gamma.len();
    for ((row, grad), gx) in kept.chunks_exact(d + 1).zip(grad.chunks_exact(d)).zip(gx.chunks_exact_mut(d)) {
        for ((gx, grad), gamma) in gx.iter_mut().zip(grad).zip(gamma) {
            *gx = grad * gamma;
        }
        let mean = lane_sum(gx, |v| v) / d as f32;
        let projection = lane_dot(gx, &row[..d]) / d as f32;
        for (gx, x) in gx.iter_mut().zip(row) {
            *gx = (*gx - mean - x * projection) * row[d];
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn parameter_gradients(kept: &[f32], grad: &[f32], g_gamma: &mut [f32], g_beta: &mut [f32]) {
    let d = g_gamma.len();
    for (row, grad) in kept.chunks_exact(d + 1).zip(grad.chunks_exact(d)) {
        for (((g_gamma, g_beta), grad), x) in g_gamma.iter_mut().zip(g_beta.iter_mut()).zip(grad).zip(row) {
            *g_gamma += grad * x;
            *g_beta += grad;
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::{Device, Gradients};

    use super::*;
    use crate::ops::testing::{assert_close, assert_gradients_close, devices, leaves};

    /// Shapes cover an odd width, widths of whole vectors, and more rows than a block sums.
    #[test]
    fn matches_plain_forward_and_backward() {
        for device in devices() {
            for shape in [[3, 5, 37], [3, 47, 64], [2, 33, 384]] {
                check(&device, shape);
            }
        }
    }

    fn check(device: &Device, shape: [usize; 3]) {
        let x = leaves(device, &[shape], 1).remove(0);
        let weights = leaves(device, &[[shape[2]], [shape[2]]], 2);
        let y = layer_norm(x.clone(), weights[0].clone(), weights[1].clone(), 1e-6);
        let expected = plain(x.clone(), weights[0].clone(), weights[1].clone(), 1e-6);
        assert_close("forward", y.clone().inner(), expected.clone().inner(), 1e-6);
        let grads = backward_squared(y);
        let expected = backward_squared(expected);
        assert_gradients_close("input", &x, &grads, &expected, 3e-6);
        assert_gradients_close("gamma", &weights[0], &grads, &expected, 3e-6);
        assert_gradients_close("beta", &weights[1], &grads, &expected, 3e-6);
    }

    /// Runs the backward pass from `y`, whose gradient is `y²`.
    fn backward_squared(y: Tensor<3>) -> Gradients {
        (y.clone() * y.inner().autodiff().powf_scalar(2.0)).sum().backward()
    }
}
