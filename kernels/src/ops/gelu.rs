//! The exact GELU (Hendrycks and Gimpel 2016).
//!
//! ```text
//! y  = x · Φ(x)                Φ(x) = (1 + erf(x / √2)) / 2
//! gx = g · (Φ(x) + x · φ(x))   φ(x) = exp(-x² / 2) / √(2π)
//! ```

use burn_flex::Flex;
use burn_flex::FlexTensor;
use burn_tensor::Tensor;
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cpu::{contiguous, is_flex, like, owned, slice, slice_mut};
#[cfg(feature = "cube")]
use super::cube;
use super::in_f32;
use super::math::{erf, exp, over_rows};
use super::number::Number;

/// Returns the GELU of every element of `x`.
pub fn gelu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    #[cfg(feature = "cube")]
    if cube::is_cube(&x) {
        return run(cube::Gelu, [x.into()]);
    }
    if is_flex(&x) { run(Gelu, [x.into()]) } else { plain(x) }
}

/// Computes in f32 at least, for any type of `x`. Burn's own operation is not used because its
/// backward pass is that of the tanh approximation on all backends except Flex. It put gradients of
/// a network off by 2e-4.
fn plain<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let dtype = x.dtype();
    let x = in_f32(x);
    let cdf = ((x.clone() * std::f64::consts::FRAC_1_SQRT_2).erf() + 1.0) * 0.5;
    (x * cdf).cast(dtype)
}

#[derive(Debug, Clone)]
struct Gelu;

impl Kernel<Flex, 1> for Gelu {
    type Saved = FlexTensor;

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, FlexTensor) {
        let x = contiguous(&x);
        let values = slice(&x);
        let mut y = vec![0.0; values.len()];
        over_rows(&mut y, 1024, |row, out| forward(&values[row * 1024..][..out.len()], out));
        (like(&x, y), x)
    }

    fn backward(&self, x: FlexTensor, grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let values = slice(&x);
        let mut gx = owned(grad);
        over_rows(slice_mut(&mut gx), 1024, |row, out| {
            scale_by_slope(&values[row * 1024..][..out.len()], out)
        });
        [Some(gx)]
    }
}

/// Writes the GELU of every element of `x` to `y`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub(super) fn forward<T: Number>(x: &[T], y: &mut [T]) {
    for (y, x) in y.iter_mut().zip(x) {
        let x = x.wide();
        *y = T::nearest(x * 0.5 * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2)));
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn scale_by_slope(x: &[f32], grad: &mut [f32]) {
    for (grad, x) in grad.iter_mut().zip(x) {
        *grad *= value_and_slope(*x)[1];
    }
}

/// Replaces `x` by its GELU, and multiplies `grad` by the slope.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub(super) fn value_and_gradient<T: Number>(x: &mut [T], grad: &mut [T]) {
    for (grad, x) in grad.iter_mut().zip(x) {
        let [value, slope] = value_and_slope(x.wide());
        *grad = T::nearest(grad.wide() * slope);
        *x = T::nearest(value);
    }
}

/// Returns `x · Φ(x)` and `Φ(x) + x · φ(x)`.
#[inline(always)]
fn value_and_slope(x: f32) -> [f32; 2] {
    const INV_SQRT_TAU: f32 = 0.398_942_3;
    let cdf = 0.5 * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2));
    [x * cdf, cdf + x * INV_SQRT_TAU * exp(-0.5 * x * x)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, assert_gradients_close, backward, devices, leaves};

    #[test]
    fn matches_plain_forward_and_backward() {
        for device in devices() {
            for shape in [[7, 333], [70, 96]] {
                let x = leaves(&device, &[shape], 1).remove(0);
                let y = gelu(x.clone() * 3.0);
                let expected = plain(x.clone() * 3.0);
                assert_close("forward", y.clone().inner(), expected.clone().inner(), 1e-6);
                assert_gradients_close("backward", &x, &backward(y), &backward(expected), 1e-6);
            }
        }
    }
}
