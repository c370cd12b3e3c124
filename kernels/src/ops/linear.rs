//! Affine maps with PyTorch's weight layout.
//!
//! ```text
//! y  = x · Wᵀ + b       x [.., D], W [O, D], b [O]
//! gx = g · W            gW = gᵀ · x            gb = Σ_rows g
//! ```
//!
//! If x is bf16, W is rounded to bf16 unless it is bf16 already, and y and gx are bf16. The CPU
//! kernel rounds W as it packs it for the product. W's gradient is f32 in any case, and so are b
//! and its gradient.

use std::marker::PhantomData;

use burn_flex::Flex;
use burn_flex::FlexTensor;
use burn_tensor::{DType, Tensor};
use half::bf16;
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cast::cast;
use super::cpu::{contiguous, dims, elements, flex_dtype, is_flex, slice, tensor};
#[cfg(feature = "cube")]
use super::cube;
use super::gemm::Mat;
use super::number::Number;
use super::product::product;
use super::weights::Weights;

/// Returns `x · Wᵀ + b` for `x` of `[B, N, D]`, `weight` of `[O, D]` and `bias` of `[O]`. If `x` is
/// f32, so are weight and bias; if it is bf16, they are f32 or bf16, but the bias is f32 on a CPU.
/// A GPU adds a bias that is rounded to the type of `x`.
pub fn linear(x: Tensor<3>, weight: Tensor<2>, bias: Tensor<1>) -> Tensor<3> {
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

fn plain(x: Tensor<3>, weight: Tensor<2>, bias: Tensor<1>) -> Tensor<3> {
    let [b, n, d] = x.dims();
    let [o, _] = weight.dims();
    let weight = cast(weight, x.dtype());
    let bias = cast(bias, x.dtype());
    (x.reshape([b * n, d]).matmul(weight.transpose()) + bias.unsqueeze()).reshape([b, n, o])
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
        let [n_images, n_tokens, d]: [usize; 3] = dims(&x);
        let [o, _]: [usize; 2] = dims(&w);
        let x = contiguous(&x);
        let w = contiguous(&w);
        let b = contiguous(&b);
        let m = n_images * n_tokens;
        let y = affine(elements::<T>(&x), Weights::of(&w), slice(&b), [m, d, o]);
        (tensor(y, [n_images, n_tokens, o]), (x, w))
    }

    fn backward(&self, (x, w): Self::Saved, grad: FlexTensor, wanted: [bool; 3]) -> [Option<FlexTensor>; 3] {
        let [n_images, n_tokens, o]: [usize; 3] = dims(&grad);
        let [_, d]: [usize; 2] = dims(&w);
        let m = n_images * n_tokens;
        let grad = contiguous(&grad);
        let g = elements::<T>(&grad);
        let gx = wanted[0].then(|| tensor(times_weight(g, Weights::of(&w), [m, o, d]), dims::<3>(&x)));
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
        let ([m, d], [o, _]): ([usize; 2], [usize; 2]) = (dims(&x), dims(&w));
        let x = contiguous(&x);
        let w = contiguous(&w);
        let y = times_transposed(slice(&x), Weights::of(&w), [m, d, o]);
        (tensor(y, [m, o]), (x, w))
    }

    fn backward(&self, (x, w): Self::Saved, grad: FlexTensor, wanted: [bool; 2]) -> [Option<FlexTensor>; 2] {
        let ([m, o], [_, d]): ([usize; 2], [usize; 2]) = (dims(&grad), dims(&w));
        let grad = contiguous(&grad);
        let gx = wanted[0].then(|| tensor(times_weight(slice(&grad), Weights::of(&w), [m, o, d]), [m, d]));
        let gw = wanted[1].then(|| tensor(weight_gradient(slice(&grad), slice(&x), [m, o, d]), [o, d]));
        [gx, gw]
    }
}

/// `x · Wᵀ + b`: `[M, D] · [D, O] + [O]`.
pub(super) fn affine<T: Number>(x: &[T], weight: Weights<'_>, bias: &[f32], [m, d, o]: [usize; 3]) -> Vec<T> {
    transposed_product(x, weight, Some(bias), [m, d, o])
}

/// `x · Wᵀ`: `[M, D] · [D, O]`.
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

/// `g · W`: `[M, O] · [O, D]`.
pub(super) fn times_weight<T: Number>(grad: &[T], weight: Weights<'_>, [m, o, d]: [usize; 3]) -> Vec<T> {
    let grad = Mat::rows(grad, o);
    match weight {
        Weights::Wide(weight) => product([m, o, d], grad, Mat::rows(weight, d), None),
        Weights::Narrow(weight) => product([m, o, d], grad, Mat::rows(weight, d), None),
    }
}

/// `gᵀ · x`: `[O, M] · [M, D]`.
pub(super) fn weight_gradient<T: Number>(grad: &[T], x: &[T], [m, o, d]: [usize; 3]) -> Vec<f32> {
    product([o, m, d], Mat::rows(grad, o).t(), Mat::rows(x, d), None)
}

/// Returns the column sums of rows of `row_len` elements.
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
    use crate::ops::twin::{assert_close, devices, leaves, types};

    /// Few rows, and more rows than a block sums.
    #[test]
    fn it_equals_its_twin_forwards_and_backwards() {
        for device in devices() {
            for (dtype, tolerance) in types(&device, 2e-6) {
                let sizes = [[3, 4, 19, 11], [2, 83, 32, 24]];
                sizes.iter().for_each(|sizes| check(&device, *sizes, [dtype, DType::F32], tolerance));
                if dtype == DType::BF16 {
                    sizes.iter().for_each(|sizes| check(&device, *sizes, [dtype; 2], tolerance));
                }
            }
        }
    }

    /// Compares them on inputs and weights of these types.
    fn check(device: &Device, [b, n, d, o]: [usize; 4], [dtype, of_weights]: [DType; 2], tolerance: f32) {
        let x = leaves(device, &[[b, n, d]], 1).remove(0);
        let w = leaves(device, &[[o, d]], 2).remove(0);
        let bias = leaves(device, &[[o]], 3).remove(0);
        let stored = || cast(w.clone(), of_weights);
        let y = linear(cast(x.clone(), dtype), stored(), bias.clone());
        let twin = plain(cast(x.clone(), dtype), stored(), bias.clone());
        assert_eq!(y.dtype(), dtype);
        assert_close("forward", y.clone().inner(), twin.clone().inner(), tolerance / 2.0);
        let gradients = |y: Tensor<3>| {
            let grads = (y.clone() * y.inner().autodiff()).sum().backward();
            (x.grad(&grads).expect("leaf"), w.grad(&grads).expect("leaf"), bias.grad(&grads).expect("leaf"))
        };
        let a = gradients(y);
        let t = gradients(twin);
        assert_eq!([a.1.dtype(), a.2.dtype()], [DType::F32; 2]);
        assert_close("input", a.0, t.0, tolerance);
        assert_close("weight", a.1, t.1, tolerance);
        assert_close("bias", a.2, t.2, tolerance);
    }

    /// Alone and in batches, with a factor that is a view.
    #[test]
    fn the_product_equals_its_twin_forwards_and_backwards() {
        for device in devices() {
            for (dtype, tolerance) in types(&device, 2e-6) {
                for [b, m, k, n] in [[1, 5, 9, 7], [3, 37, 64, 40]] {
                    let x = leaves(&device, &[[b, m, k]], 1).remove(0);
                    let w = leaves(&device, &[[b, n, k]], 2).remove(0);
                    let factors = || (cast(x.clone(), dtype), cast(w.clone(), dtype).swap_dims(1, 2));
                    let gradients = |y: Tensor<3>| {
                        let grads = (y.clone() * y.inner().autodiff()).sum().backward();
                        (x.grad(&grads).expect("leaf"), w.grad(&grads).expect("leaf"))
                    };
                    let (a, b) = factors();
                    let (c, d) = factors();
                    let y = matmul(a, b);
                    let twin = c.matmul(d);
                    assert_close("forward", y.clone().inner(), twin.clone().inner(), tolerance);
                    let a = gradients(y);
                    let t = gradients(twin);
                    assert_close("left", a.0, t.0, tolerance);
                    assert_close("right", a.1, t.1, tolerance);
                }
            }
        }
    }

    #[test]
    fn the_product_without_bias_equals_its_twin() {
        let leaves = leaves(&Device::flex(), &[[6, 5], [9, 5]], 4);
        let x = leaves[0].clone();
        let w = leaves[1].clone();
        let y = matmul_transposed(x.clone(), w.clone());
        let twin = x.clone().matmul(w.clone().transpose());
        let gradient = |y: Tensor<2>| {
            let grads = (y.clone() * y.inner().autodiff()).sum().backward();
            (x.grad(&grads).expect("leaf"), w.grad(&grads).expect("leaf"))
        };
        let a = gradient(y);
        let t = gradient(twin);
        assert_close("input", a.0, t.0, 2e-6);
        assert_close("weight", a.1, t.1, 2e-6);
    }
}
