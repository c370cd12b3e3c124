//! Two affine maps with a GELU between them: the MLP of a transformer block.
//!
//! ```text
//! h  = x · W₁ᵀ + b₁     y   = gelu(h) · W₂ᵀ + b₂
//! gh = (g · W₂) ∘ gelu'(h)
//! gx = gh · W₁          gW₁ = ghᵀ · x        gb₁ = Σ_rows gh
//!                       gW₂ = gᵀ · gelu(h)   gb₂ = Σ_rows g
//! ```
//!
//! x `[.., D]`, W₁ `[H, D]`, b₁ `[H]`, W₂ `[O, H]`, b₂ `[O]`. The CPU kernel keeps only `h`: the
//! backward pass computes gelu(h) and the slope from the same error function, so that the graph
//! holds one hidden layer less.

use std::marker::PhantomData;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::bridge::{Kernel, run};
use super::cpu::{
    add, contiguous, dims, elements, elements_mut, flex_dtype, like, like_with_length, owned,
    rows_and_length, slice, tensor,
};
use super::gelu::{self, gelu};
use super::linear::{affine, column_sums, linear, times_transposed, times_weight, weight_gradient};
use super::number::Number;
use super::weights::Weights;

/// Returns `gelu(x · W₁ᵀ + b₁) · W₂ᵀ + b₂` for `x` of `[.., D]`. Layers are weight and bias;
/// types are as in [`linear`].
pub fn mlp<const D: usize>(
    x: Tensor<D>,
    first: (Tensor<2>, Tensor<1>),
    second: (Tensor<2>, Tensor<1>),
) -> Tensor<D> {
    match flex_dtype(&x) {
        Some(DType::F32) => mlp_on_flex::<f32, D>(x, first, second),
        Some(DType::BF16) => mlp_on_flex::<bf16, D>(x, first, second),
        _ => plain(x, first, second),
    }
}

fn mlp_on_flex<T: Number, const D: usize>(
    x: Tensor<D>,
    first: (Tensor<2>, Tensor<1>),
    second: (Tensor<2>, Tensor<1>),
) -> Tensor<D> {
    let inputs = [x.into(), first.0.into(), first.1.into(), second.0.into(), second.1.into()];
    run(Mlp(PhantomData::<T>), inputs)
}

fn plain<const D: usize>(
    x: Tensor<D>,
    first: (Tensor<2>, Tensor<1>),
    second: (Tensor<2>, Tensor<1>),
) -> Tensor<D> {
    linear(gelu(linear(x, first.0, first.1)), second.0, second.1)
}

/// Kernel for `x` with elements of type `T`.
#[derive(Debug, Clone)]
struct Mlp<T>(PhantomData<T>);

/// Tensors kept for the backward pass.
#[derive(Debug, Clone)]
struct Saved {
    x: FlexTensor,
    w1: FlexTensor,
    /// Hidden layer before its GELU, `[rows, H]`.
    h: FlexTensor,
    w2: FlexTensor,
}

impl<T: Number> Kernel<Flex, 5> for Mlp<T> {
    type Saved = Saved;

    fn forward(&self, inputs: [FlexTensor; 5]) -> (FlexTensor, Saved) {
        let [x, w1, b1, w2, b2] = inputs.each_ref().map(contiguous);
        let (m, d) = rows_and_length(&x);
        let [hidden, _]: [usize; 2] = dims(&w1);
        let [o, _]: [usize; 2] = dims(&w2);
        let (h, a) = hidden_layer(elements::<T>(&x), Weights::from_tensor(&w1), slice(&b1), [m, d, hidden]);
        let y = affine(&a, Weights::from_tensor(&w2), slice(&b2), [m, hidden, o]);
        (like_with_length(&x, y, o), Saved { x, w1, h: tensor(h, [m, hidden]), w2 })
    }

    fn backward(&self, saved: Saved, grad: FlexTensor, wanted: [bool; 5]) -> [Option<FlexTensor>; 5] {
        let Saved { x, w1, h, w2 } = saved;
        let (m, d) = rows_and_length(&x);
        let [hidden, _]: [usize; 2] = dims(&w1);
        let [o, _]: [usize; 2] = dims(&w2);
        let grad = contiguous(&grad);
        let g = elements::<T>(&grad);
        let mut gh = times_weight(g, Weights::from_tensor(&w2), [m, o, hidden]);
        // The activation overwrites the hidden layer that it is computed from.
        let mut a = owned(h);
        let gh_sums = activation_and_gradient(elements_mut(&mut a), &mut gh, hidden);
        let gx = wanted[0].then(|| like(&x, times_weight(&gh, Weights::from_tensor(&w1), [m, hidden, d])));
        let gw1 = wanted[1].then(|| tensor(weight_gradient(&gh, elements(&x), [m, hidden, d]), [hidden, d]));
        let gb1 = wanted[2].then(|| tensor(gh_sums, [hidden]));
        let gw2 = wanted[3].then(|| tensor(weight_gradient(g, elements(&a), [m, o, hidden]), [o, hidden]));
        let gb2 = wanted[4].then(|| tensor(column_sums(g, o), [o]));
        [gx, gw1, gb1, gw2, gb2]
    }
}

/// Returns the hidden layer before and after its GELU, `[M, H]` each.
fn hidden_layer<T: Number>(x: &[T], weight: Weights<'_>, bias: &[f32], mdh: [usize; 3]) -> (Vec<T>, Vec<T>) {
    let is_f32 = T::DTYPE == DType::F32;
    // In f32, adding the bias in the same pass as the GELU is cheaper. In bf16, it is added before
    // the only rounding.
    let mut h = if is_f32 { times_transposed(x, weight, mdh) } else { affine(x, weight, bias, mdh) };
    let mut a = vec![T::default(); h.len()];
    let rows = h.par_chunks_exact_mut(bias.len()).zip(a.par_chunks_exact_mut(bias.len()));
    rows.for_each(|(h, a)| {
        if is_f32 {
            add(bytemuck::cast_slice_mut(h), bias);
        }
        gelu::forward(h, a);
    });
    (h, a)
}

/// Replaces `h` by its GELU, multiplies `grad` by the slope, and returns the column sums of `grad`.
fn activation_and_gradient<T: Number>(h: &mut [T], grad: &mut [T], row_len: usize) -> Vec<f32> {
    let rows = h.par_chunks_exact_mut(row_len).zip(grad.par_chunks_exact_mut(row_len));
    rows.for_each(|(h, grad)| gelu::value_and_gradient(h, grad));
    column_sums(grad, row_len)
}

#[cfg(test)]
mod tests {
    use burn_tensor::Device;

    use super::*;
    use crate::ops::cast;
    use crate::ops::testing::{assert_close, assert_gradients_close, backward, devices, leaves, types};

    #[test]
    fn matches_plain_forward_and_backward() {
        for device in devices() {
            for (dtype, tolerance) in types(&device, 3e-6) {
                for sizes in [[3, 4, 19, 11, 19], [2, 83, 32, 130, 24]] {
                    check(&device, sizes, dtype, tolerance);
                }
            }
        }
    }

    fn check(device: &Device, [b, n, d, hidden, o]: [usize; 5], dtype: DType, tolerance: f32) {
        let x = leaves(device, &[[b, n, d]], 1).remove(0);
        let weights = leaves(device, &[[hidden, d], [o, hidden]], 2);
        let biases = leaves(device, &[[hidden], [o]], 3);
        let first = (weights[0].clone(), biases[0].clone());
        let second = (weights[1].clone(), biases[1].clone());
        let y = mlp(cast(x.clone(), dtype), first.clone(), second.clone());
        let expected = plain(cast(x.clone(), dtype), first, second);
        assert_eq!(y.dtype(), dtype);
        assert_close("forward", y.clone().inner(), expected.clone().inner(), tolerance / 1.5);
        let grads = backward(y);
        let expected = backward(expected);
        assert_gradients_close("input", &x, &grads, &expected, tolerance);
        for (name, weight) in ["W1", "W2"].iter().zip(&weights) {
            assert_eq!(weight.grad(&grads).expect("leaf").dtype(), DType::F32);
            assert_gradients_close(name, weight, &grads, &expected, tolerance);
        }
        for (name, bias) in ["b1", "b2"].iter().zip(&biases) {
            assert_eq!(bias.grad(&grads).expect("leaf").dtype(), DType::F32);
            assert_gradients_close(name, bias, &grads, &expected, tolerance);
        }
    }
}
