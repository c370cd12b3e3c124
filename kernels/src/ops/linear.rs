//! Affine maps with PyTorch's weight layout.
//!
//! ```text
//! y  = x · Wᵀ + b       x [.., D], W [O, D], b [O]
//! gx = g · W            gW = gᵀ · x            gb = Σ_rows g
//! ```
//!
//! If x is bf16, W is rounded to bf16 unless it is bf16 already, and y and gx are bf16. The CPU
//! kernel rounds W while it packs it for the product. The gradient of W is always f32, and so are b
//! and its gradient.

use std::marker::PhantomData;

use burn_flex::Flex;
use burn_flex::FlexTensor;
use burn_tensor::{DType, Tensor};
use half::bf16;
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cast::cast;
use super::cpu::{
    contiguous, dims, elements, flex_dtype, is_flex, like, like_with_length, rows_and_length, slice, tensor,
};
use super::cpu_product::product;
#[cfg(feature = "cube")]
use super::cube;
use super::gemm::Mat;
use super::number::Number;
use super::weights::Weights;

/// Returns `x · Wᵀ + b` for `x` of `[.., D]`, `weight` of `[O, D]` and `bias` of `[O]`. If `x` is
/// f32, so are weight and bias; if it is bf16, they are f32 or bf16, but the bias is f32 on a CPU.
/// A GPU adds a bias that is rounded to the type of `x`.
pub fn linear<const D: usize>(x: Tensor<D>, weight: Tensor<2>, bias: Tensor<1>) -> Tensor<D> {
    #[cfg(feature = "cube")]
    if cube::is_cube(&x) {
        let dtype = x.dtype();
        return run(cube::Linear, [x.into(), cast(weight, dtype).into(), cast(bias, dtype).into()]);
    }
    match flex_dtype(&x) {
        Some(DType::F32) => run(Linear(PhantomData::<f32>), [x.into(), weight.into(), bias.into()]),
        Some(DType::BF16) => run(Linear(PhantomData::<bf16>), [x.into(), weight.into(), bias.into()]),
        _ => plain(x, weight, bias),
    }
}

fn plain<const D: usize>(x: Tensor<D>, weight: Tensor<2>, bias: Tensor<1>) -> Tensor<D> {
    let mut shape = x.dims();
    let [o, d] = weight.dims();
    let weight = cast(weight, x.dtype());
    let bias = cast(bias, x.dtype());
    let n_rows = shape.iter().product::<usize>() / d;
    shape[D - 1] = o;
    (x.reshape([n_rows, d]).matmul(weight.transpose()) + bias.unsqueeze()).reshape(shape)
}

/// Returns `x · Wᵀ` for `x` of `[M, D]` and `weight` of `[O, D]`.
pub fn matmul_transposed(x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    if is_flex(&x) { run(MatmulTransposed, [x.into(), weight.into()]) } else { matmul(x, weight.transpose()) }
}

/// Returns `a · b` for `a` of `[.., M, K]` and `b` of `[.., K, N]`, whose other dimensions are
/// equal.
pub fn matmul<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> Tensor<D> {
    #[cfg(feature = "cube")]
    if cube::is_cube(&a) {
        return run(cube::Matmul, [a.into(), b.into()]);
    }
    a.matmul(b)
}

/// Kernel for `x` with elements of type `T`.
#[derive(Debug, Clone)]
struct Linear<T>(PhantomData<T>);

impl<T: Number> Kernel<Flex, 3> for Linear<T> {
    type Saved = (FlexTensor, FlexTensor);

    fn forward(&self, [x, w, b]: [FlexTensor; 3]) -> (FlexTensor, Self::Saved) {
        let (m, d) = rows_and_length(&x);
        let [o, _]: [usize; 2] = dims(&w);
        let x = contiguous(&x);
        let w = contiguous(&w);
        let b = contiguous(&b);
        let y = affine(elements::<T>(&x), Weights::from_tensor(&w), slice(&b), [m, d, o]);
        (like_with_length(&x, y, o), (x, w))
    }

    fn backward(&self, (x, w): Self::Saved, grad: FlexTensor, wanted: [bool; 3]) -> [Option<FlexTensor>; 3] {
        let (m, o) = rows_and_length(&grad);
        let [_, d]: [usize; 2] = dims(&w);
        let grad = contiguous(&grad);
        let g = elements::<T>(&grad);
        let gx = wanted[0].then(|| like(&x, times_weight(g, Weights::from_tensor(&w), [m, o, d])));
        let gw = wanted[1].then(|| tensor(weight_gradient(g, elements::<T>(&x), [m, o, d]), [o, d]));
        let gb = wanted[2].then(|| tensor(column_sums(g, o), [o]));
        [gx, gw, gb]
    }
}

#[derive(Debug, Clone)]
struct MatmulTransposed;

impl Kernel<Flex, 2> for MatmulTransposed {
    type Saved = (FlexTensor, FlexTensor);

    fn forward(&self, [x, w]: [FlexTensor; 2]) -> (FlexTensor, Self::Saved) {
        let [m, d]: [usize; 2] = dims(&x);
        let [o, _]: [usize; 2] = dims(&w);
        let x = contiguous(&x);
        let w = contiguous(&w);
        let y = times_transposed(slice(&x), Weights::from_tensor(&w), [m, d, o]);
        (tensor(y, [m, o]), (x, w))
    }

    fn backward(&self, (x, w): Self::Saved, grad: FlexTensor, wanted: [bool; 2]) -> [Option<FlexTensor>; 2] {
        let [m, o]: [usize; 2] = dims(&grad);
        let [_, d]: [usize; 2] = dims(&w);
        let grad = contiguous(&grad);
        let gx = wanted[0]
            .then(|| tensor(times_weight(slice(&grad), Weights::from_tensor(&w), [m, o, d]), [m, d]));
        let gw = wanted[1].then(|| tensor(weight_gradient(slice(&grad), slice(&x), [m, o, d]), [o, d]));
        [gx, gw]
    }
}

/// Returns `x · Wᵀ + b`: `[M, D] · [D, O] + [O]`.
pub(super) fn affine<T: Number>(x: &[T], weight: Weights<'_>, bias: &[f32], [m, d, o]: [usize; 3]) -> Vec<T> {
    transposed_product(x, weight, Some(bias), [m, d, o])
}

/// Returns `x · Wᵀ`: `[M, D] · [D, O]`.
pub(super) fn times_transposed<T: Number>(x: &[T], weight: Weights<'_>, mdo: [usize; 3]) -> Vec<T> {
    transposed_product(x, weight, None, mdo)
}

fn transposed_product<T: Number>(
    x: &[T],
    weight: Weights<'_>,
    bias: Option<&[f32]>,
    [m, d, o]: [usize; 3],
) -> Vec<T> {
    let x = Mat::rows(x, d);
    match weight {
        Weights::Wide(weight) => product([m, d, o], x, Mat::rows(weight, d).t(), bias),
        Weights::Narrow(weight) => product([m, d, o], x, Mat::rows(weight, d).t(), bias),
    }
}

/// Returns `g · W`: `[M, O] · [O, D]`.
pub(super) fn times_weight<T: Number>(grad: &[T], weight: Weights<'_>, [m, o, d]: [usize; 3]) -> Vec<T> {
    let grad = Mat::rows(grad, o);
    match weight {
        Weights::Wide(weight) => product([m, o, d], grad, Mat::rows(weight, d), None),
        Weights::Narrow(weight) => product([m, o, d], grad, Mat::rows(weight, d), None),
    }
}

/// Returns `gᵀ · x`: `[O, M] · [M, D]`.
pub(super) fn weight_gradient<T: Number>(grad: &[T], x: &[T], [m, o, d]: [usize; 3]) -> Vec<f32> {
    product([o, m, d], Mat::rows(grad, o).t(), Mat::rows(x, d), None)
}

/// Returns the sums of the columns of `rows`, each of which has `row_len` elements.
pub(super) fn column_sums<T: Number>(rows: &[T], row_len: usize) -> Vec<f32> {
    let mut sums = vec![0.0; row_len];
    add_rows(rows, &mut sums);
    sums
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_rows<T: Number>(rows: &[T], sums: &mut [f32]) {
    for row in rows.chunks_exact(sums.len()) {
        for (sum, value) in sums.iter_mut().zip(row) {
            *sum += value.wide();
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::Device;

    use super::*;
    use crate::ops::testing::{assert_close, assert_gradients_close, backward, devices, leaves, types};

    /// Sizes cover few rows, and more rows than a block sums.
    #[test]
    fn matches_plain_forward_and_backward() {
        for device in devices() {
            for (dtype, tolerance) in types(&device, 2e-6) {
                for sizes in [[3, 4, 19, 11], [2, 83, 32, 24]] {
                    check(&device, sizes, dtype, DType::F32, tolerance);
                    if dtype == DType::BF16 {
                        check(&device, sizes, dtype, dtype, tolerance);
                    }
                }
            }
        }
    }

    /// Compares [`linear`] and [`plain`] on inputs and weights of these types.
    fn check(device: &Device, [b, n, d, o]: [usize; 4], dtype: DType, weight_dtype: DType, tolerance: f32) {
        let x = leaves(device, &[[b, n, d]], 1).remove(0);
        let w = leaves(device, &[[o, d]], 2).remove(0);
        let bias = leaves(device, &[[o]], 3).remove(0);
        let y = linear(cast(x.clone(), dtype), cast(w.clone(), weight_dtype), bias.clone());
        let expected = plain(cast(x.clone(), dtype), cast(w.clone(), weight_dtype), bias.clone());
        assert_eq!(y.dtype(), dtype);
        assert_close("forward", y.clone().inner(), expected.clone().inner(), tolerance / 2.0);
        let grads = backward(y);
        let expected = backward(expected);
        assert_eq!(w.grad(&grads).expect("leaf").dtype(), DType::F32);
        assert_eq!(bias.grad(&grads).expect("leaf").dtype(), DType::F32);
        assert_gradients_close("input", &x, &grads, &expected, tolerance);
        assert_gradients_close("weight", &w, &grads, &expected, tolerance);
        assert_gradients_close("bias", &bias, &grads, &expected, tolerance);
    }

    /// One product and a batch of products, with a factor that is a view.
    #[test]
    fn matmul_matches_burns_matmul_forward_and_backward() {
        for device in devices() {
            for (dtype, tolerance) in types(&device, 2e-6) {
                for [b, m, k, n] in [[1, 5, 9, 7], [3, 37, 64, 40]] {
                    let x = leaves(&device, &[[b, m, k]], 1).remove(0);
                    let w = leaves(&device, &[[b, n, k]], 2).remove(0);
                    let y = matmul(cast(x.clone(), dtype), cast(w.clone(), dtype).swap_dims(1, 2));
                    let expected = cast(x.clone(), dtype).matmul(cast(w.clone(), dtype).swap_dims(1, 2));
                    assert_close("forward", y.clone().inner(), expected.clone().inner(), tolerance);
                    let grads = backward(y);
                    let expected = backward(expected);
                    assert_gradients_close("left", &x, &grads, &expected, tolerance);
                    assert_gradients_close("right", &w, &grads, &expected, tolerance);
                }
            }
        }
    }

    #[test]
    fn matmul_transposed_has_the_gradients_of_burns_matmul() {
        let leaves = leaves(&Device::flex(), &[[6, 5], [9, 5]], 4);
        let x = leaves[0].clone();
        let w = leaves[1].clone();
        let y = matmul_transposed(x.clone(), w.clone());
        let expected = x.clone().matmul(w.clone().transpose());
        let grads = backward(y);
        let expected = backward(expected);
        assert_gradients_close("input", &x, &grads, &expected, 2e-6);
        assert_gradients_close("weight", &w, &grads, &expected, 2e-6);
    }
}
