//! The gate of a SwiGLU layer (Shazeer 2020).
//!
//! ```text
//! y  = a · σ(a) · b                          gb = g · a · σ(a)
//! ga = g · b · σ(a) · (1 + a · (1 - σ(a)))
//! ```
//!
//! x = [a; b] `[.., 2·H]`, y `[.., H]`, σ the logistic function. Only x is kept for the backward
//! pass.

use std::marker::PhantomData;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, Tensor, activation};
use half::bf16;
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cpu::{contiguous, elements, flex_dtype, like, like_with_length, rows_and_length};
#[cfg(feature = "cube")]
use super::cube;
use super::in_f32;
use super::math::{exp, over_rows};
use super::number::Number;

/// Returns the second half of the rows of `x` of `[.., 2·H]`, multiplied by the SiLU of the first
/// half, which is the gate: `[.., H]`.
pub fn swiglu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    #[cfg(feature = "cube")]
    if cube::is_cube(&x) {
        return run(cube::Swiglu, [x.into()]);
    }
    match flex_dtype(&x) {
        Some(DType::F32) => run(Swiglu::<f32>(PhantomData), [x.into()]),
        Some(DType::BF16) => run(Swiglu::<bf16>(PhantomData), [x.into()]),
        _ => plain(x),
    }
}

/// Computes in f32 at least.
fn plain<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let width = x.dims()[D - 1] / 2;
    let dtype = x.dtype();
    let x = in_f32(x);
    let gates = x.clone().narrow(D - 1, 0, width);
    let values = x.narrow(D - 1, width, width);
    (activation::silu(gates) * values).cast(dtype)
}

/// Kernel for elements of type `T`.
#[derive(Debug, Clone)]
struct Swiglu<T>(PhantomData<T>);

impl<T: Number> Kernel<Flex, 1> for Swiglu<T> {
    type Saved = FlexTensor;

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, FlexTensor) {
        let (n_rows, h) = rows_and_length(&x);
        let x = contiguous(&x);
        let width = h / 2;
        let mut y = vec![T::default(); n_rows * width];
        over_rows(&mut y, width, |first, rows| {
            let inputs = elements::<T>(&x)[first * h..].chunks_exact(h);
            rows.chunks_exact_mut(width).zip(inputs).for_each(|(y, x)| forward(x, y));
        });
        (like_with_length(&x, y, width), x)
    }

    fn backward(&self, x: FlexTensor, grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let (n_rows, h) = rows_and_length(&x);
        let grad = contiguous(&grad);
        let mut gx = vec![T::default(); n_rows * h];
        over_rows(&mut gx, h, |first, rows| {
            let inputs = elements::<T>(&x)[first * h..].chunks_exact(h);
            let grads = elements::<T>(&grad)[first * (h / 2)..].chunks_exact(h / 2);
            rows.chunks_exact_mut(h).zip(inputs).zip(grads).for_each(|((gx, x), g)| backward(x, g, gx));
        });
        [Some(like(&x, gx))]
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn forward<T: Number>(x: &[T], y: &mut [T]) {
    let (gates, values) = x.split_at(y.len());
    for ((y, a), b) in y.iter_mut().zip(gates).zip(values) {
        let a = a.wide();
        *y = T::nearest(a * logistic(a) * b.wide());
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn backward<T: Number>(x: &[T], g: &[T], gx: &mut [T]) {
    let (gates, values) = x.split_at(g.len());
    let (gate_grads, value_grads) = gx.split_at_mut(g.len());
    for ((((ga, gb), a), b), g) in gate_grads.iter_mut().zip(value_grads).zip(gates).zip(values).zip(g) {
        let a = a.wide();
        let b = b.wide();
        let g = g.wide();
        let sigma = logistic(a);
        *ga = T::nearest(g * b * sigma * (1.0 + a * (1.0 - sigma)));
        *gb = T::nearest(g * a * sigma);
    }
}

#[inline(always)]
fn logistic(a: f32) -> f32 {
    1.0 / (1.0 + exp(-a))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::cast;
    use crate::ops::testing::{assert_close, assert_gradients_close, backward, devices, leaves, types};

    #[test]
    fn matches_plain_forward_and_backward() {
        for device in devices() {
            for (dtype, tolerance) in types(&device, 2e-6) {
                for shape in [[2, 5, 38], [1, 70, 96]] {
                    let x = leaves(&device, &[shape], 1).remove(0);
                    let y = swiglu(cast(x.clone() * 3.0, dtype));
                    let expected = plain(cast(x.clone() * 3.0, dtype));
                    assert_eq!(y.dtype(), dtype);
                    assert_close("forward", y.clone().inner(), expected.clone().inner(), tolerance);
                    let grads = backward(y);
                    let expected = backward(expected);
                    assert_gradients_close("backward", &x, &grads, &expected, 2.0 * tolerance);
                }
            }
        }
    }

    #[test]
    fn large_gates_stay_finite() {
        let x = Tensor::<3>::from_floats([[[200.0, -200.0, 2.0, 3.0]]], &burn_tensor::Device::flex());
        let y = swiglu(x).into_data().try_to_vec::<f32>().expect("f32");
        assert!(y[0] == 400.0 && y[1].abs() < 1e-30, "{y:?}");
    }
}
