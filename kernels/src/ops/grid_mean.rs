//! Means over the cells of a grid, and multiplication of all cells by channel factors: the first
//! and the last step of squeeze-and-excitation.
//!
//! ```text
//! m[b, c] = 1/N Σ_n x[b, n, c]         gx[b, n, c] = g[b, c] / N
//! y[b, n, c] = x[b, n, c] · s[b, c]    gx = g · s      gs[b, c] = Σ_n g[b, n, c] · x[b, n, c]
//! ```

use std::marker::PhantomData;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, Tensor};
use half::bf16;
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cast::cast;
use super::cpu::{contiguous, dims, elements, flex_dtype, slice, tensor};
use super::in_f32;
use super::number::Number;

/// Returns the mean of `x` of `[B, N, C]` over N, `[B, 1, C]`, in f32 if `x` is bf16.
pub fn grid_mean(x: Tensor<3>) -> Tensor<3> {
    match flex_dtype(&x) {
        Some(DType::F32) => run(GridMean(PhantomData::<f32>), [x.into()]),
        Some(DType::BF16) => run(GridMean(PhantomData::<bf16>), [x.into()]),
        _ => in_f32(x).mean_dim(1),
    }
}

/// Multiplies `x` of `[B, N, C]` by `factors` of `[B, 1, C]`, which are f32 if `x` is bf16.
pub fn scale_channels(x: Tensor<3>, factors: Tensor<3>) -> Tensor<3> {
    match flex_dtype(&x) {
        Some(DType::F32) => run(ScaleChannels(PhantomData::<f32>), [x.into(), factors.into()]),
        Some(DType::BF16) => run(ScaleChannels(PhantomData::<bf16>), [x.into(), factors.into()]),
        _ => {
            let dtype = x.dtype();
            cast(in_f32(x) * factors, dtype)
        }
    }
}

/// Kernel for features with elements of type `T`.
#[derive(Debug, Clone)]
struct GridMean<T>(PhantomData<T>);

impl<T: Number> Kernel<Flex, 1> for GridMean<T> {
    /// Shape of the input.
    type Saved = [usize; 3];

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, [usize; 3]) {
        let shape @ [b, n, c] = dims(&x);
        let mut mean = vec![0.0; b * c];
        add_rows(elements::<T>(&contiguous(&x)), &mut mean, n, c, 1.0 / n as f32);
        (tensor(mean, [b, 1, c]), shape)
    }

    fn backward(&self, [b, n, c]: [usize; 3], grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let grad = contiguous(&grad);
        let mut gx = vec![T::default(); b * n * c];
        broadcast_rows(slice(&grad), &mut gx, n, c, 1.0 / n as f32);
        [Some(tensor(gx, [b, n, c]))]
    }
}

/// Kernel for features with elements of type `T`.
#[derive(Debug, Clone)]
struct ScaleChannels<T>(PhantomData<T>);

impl<T: Number> Kernel<Flex, 2> for ScaleChannels<T> {
    type Saved = (FlexTensor, FlexTensor);

    fn forward(&self, [x, factors]: [FlexTensor; 2]) -> (FlexTensor, Self::Saved) {
        let shape @ [_, n, c] = dims(&x);
        let x = contiguous(&x);
        let factors = contiguous(&factors);
        let mut y = elements::<T>(&x).to_vec();
        multiply(&mut y, slice(&factors), n, c);
        (tensor(y, shape), (x, factors))
    }

    fn backward(
        &self,
        (x, factors): Self::Saved,
        grad: FlexTensor,
        wanted: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        let shape @ [b, n, c] = dims(&x);
        let grad = contiguous(&grad);
        let gs = wanted[1].then(|| {
            let mut gs = vec![0.0; b * c];
            add_products(elements::<T>(&grad), elements::<T>(&x), &mut gs, n, c);
            tensor(gs, [b, 1, c])
        });
        let gx = wanted[0].then(|| {
            let mut gx = elements::<T>(&grad).to_vec();
            multiply(&mut gx, slice(&factors), n, c);
            tensor(gx, shape)
        });
        [gx, gs]
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_rows<T: Number>(x: &[T], sums: &mut [f32], n: usize, c: usize, factor: f32) {
    for (rows, sum) in x.chunks_exact(n * c).zip(sums.chunks_exact_mut(c)) {
        for row in rows.chunks_exact(c) {
            for (sum, x) in sum.iter_mut().zip(row) {
                *sum += x.wide();
            }
        }
        for sum in sum {
            *sum *= factor;
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn broadcast_rows<T: Number>(values: &[f32], rows: &mut [T], n: usize, c: usize, factor: f32) {
    for (rows, values) in rows.chunks_exact_mut(n * c).zip(values.chunks_exact(c)) {
        for row in rows.chunks_exact_mut(c) {
            for (out, value) in row.iter_mut().zip(values) {
                *out = T::nearest(value * factor);
            }
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn multiply<T: Number>(rows: &mut [T], factors: &[f32], n: usize, c: usize) {
    for (rows, factors) in rows.chunks_exact_mut(n * c).zip(factors.chunks_exact(c)) {
        for row in rows.chunks_exact_mut(c) {
            for (x, factor) in row.iter_mut().zip(factors) {
                *x = T::nearest(x.wide() * factor);
            }
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_products<T: Number>(a: &[T], b: &[T], sums: &mut [f32], n: usize, c: usize) {
    for ((a, b), sum) in a.chunks_exact(n * c).zip(b.chunks_exact(n * c)).zip(sums.chunks_exact_mut(c)) {
        for (a, b) in a.chunks_exact(c).zip(b.chunks_exact(c)) {
            for ((sum, a), b) in sum.iter_mut().zip(a).zip(b) {
                *sum += a.wide() * b.wide();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, assert_gradients_close, backward, devices, leaves, types};

    #[test]
    fn means_and_products_match_burns_operations_forward_and_backward() {
        for device in devices() {
            let x = leaves(&device, &[[3, 35, 19]], 1).remove(0);
            let factors = leaves(&device, &[[3, 1, 19]], 2).remove(0);
            for (dtype, tolerance) in types(&device, 2e-6) {
                check(&x, &factors, dtype, tolerance);
            }
        }
    }

    fn check(x: &Tensor<3>, factors: &Tensor<3>, dtype: DType, tolerance: f32) {
        let mean = grid_mean(cast(x.clone(), dtype));
        let expected = in_f32(cast(x.clone(), dtype)).mean_dim(1);
        assert_eq!(mean.dtype(), DType::F32);
        assert_close("mean", mean.clone().inner(), expected.clone().inner(), 1e-6);
        assert_gradients_close("input of the mean", x, &backward(mean), &backward(expected), tolerance);
        let y = scale_channels(cast(x.clone(), dtype), factors.clone());
        let expected = cast(in_f32(cast(x.clone(), dtype)) * factors.clone(), dtype);
        assert_eq!(y.dtype(), dtype);
        assert_close("product", y.clone().inner(), expected.clone().inner(), tolerance);
        let grads = backward(y);
        let expected = backward(expected);
        assert_gradients_close("input", x, &grads, &expected, tolerance);
        assert_gradients_close("factors", factors, &grads, &expected, tolerance);
    }
}
