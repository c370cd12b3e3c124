//! Two affine maps with a GELU between them: the MLP of a transformer block.
//!
//! ```text
//! h  = x · W₁ᵀ + b₁     y   = gelu(h) · W₂ᵀ + b₂          x [.., D], W₁ [H, D], b₁ [H], W₂ [O, H], b₂ [O]
//! gh = (g · W₂) ∘ gelu'(h)
//! gx = gh · W₁          gW₁ = ghᵀ · x        gb₁ = Σ_rows gh
//!                       gW₂ = gᵀ · gelu(h)   gb₂ = Σ_rows g
//! ```
//!
//! The CPU kernel keeps only `h`: the backward pass computes gelu(h) from the same error function
//! as the slope, so that a graph holds one hidden layer less.

use std::marker::PhantomData;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::bridge::{Kernel, run};
use super::cpu::{add, contiguous, dims, elements, elements_mut, flex_dtype, owned, slice, tensor};
use super::gelu::{self, gelu};
use super::linear::{affine, column_sums, linear, times_transposed, times_weight, weight_gradient};
use super::number::Number;
use super::weights::Weights;

/// Returns `gelu(x · W₁ᵀ + b₁) · W₂ᵀ + b₂` for `x` of `[B, N, D]`, by layer weight and bias; types
/// as in [`linear`].
pub fn mlp(x: Tensor<3>, first: (Tensor<2>, Tensor<1>), second: (Tensor<2>, Tensor<1>)) -> Tensor<3> {
    match flex_dtype(&x) {
        Some(DType::F32) => on_flex::<f32>(x, first, second),
        Some(DType::BF16) => on_flex::<bf16>(x, first, second),
        _ => plain(x, first, second),
    }
}

fn on_flex<T: Number>(
    x: Tensor<3>,
    first: (Tensor<2>, Tensor<1>),
    second: (Tensor<2>, Tensor<1>),
) -> Tensor<3> {
    let inputs = [x.into(), first.0.into(), first.1.into(), second.0.into(), second.1.into()];
    run(Mlp(PhantomData::<T>), inputs)
}

fn plain(x: Tensor<3>, first: (Tensor<2>, Tensor<1>), second: (Tensor<2>, Tensor<1>)) -> Tensor<3> {
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
    /// Hidden layer before its GELU, `[B·N, H]`.
    h: FlexTensor,
    w2: FlexTensor,
}

impl<T: Number> Kernel<Flex, 5> for Mlp<T> {
    type Saved = Saved;

    fn forward(&self, inputs: [FlexTensor; 5]) -> (FlexTensor, Saved) {
        let [x, w1, b1, w2, b2] = inputs.each_ref().map(contiguous);
        let [n_images, n_tokens, d]: [usize; 3] = dims(&x);
        let ([hidden, _], [o, _]): ([usize; 2], [usize; 2]) = (dims(&w1), dims(&w2));
        let m = n_images * n_tokens;
        let (h, a) = hidden_layer(elements::<T>(&x), Weights::of(&w1), slice(&b1), [m, d, hidden]);
        let y = affine(&a, Weights::of(&w2), slice(&b2), [m, hidden, o]);
        (tensor(y, [n_images, n_tokens, o]), Saved { x, w1, h: tensor(h, [m, hidden]), w2 })
    }

    fn backward(&self, saved: Saved, grad: FlexTensor, wanted: [bool; 5]) -> [Option<FlexTensor>; 5] {
        let Saved { x, w1, h, w2 } = saved;
        let [n_images, n_tokens, d]: [usize; 3] = dims(&x);
        let ([hidden, _], [o, _]): ([usize; 2], [usize; 2]) = (dims(&w1), dims(&w2));
        let m = n_images * n_tokens;
        let grad = contiguous(&grad);
        let g = elements::<T>(&grad);
        let mut gh = times_weight(g, Weights::of(&w2), [m, o, hidden]);
        // The activation overwrites the hidden layer that it is computed from.
        let mut a = owned(h);
        let sums_of_gh = activation_and_gradient(elements_mut(&mut a), &mut gh, hidden);
        let gx =
            wanted[0].then(|| tensor(times_weight(&gh, Weights::of(&w1), [m, hidden, d]), dims::<3>(&x)));
        let gw1 = wanted[1].then(|| tensor(weight_gradient(&gh, elements(&x), [m, hidden, d]), [hidden, d]));
        let gb1 = wanted[2].then(|| tensor(sums_of_gh, [hidden]));
        let gw2 = wanted[3].then(|| tensor(weight_gradient(g, elements(&a), [m, o, hidden]), [o, hidden]));
        let gb2 = wanted[4].then(|| tensor(column_sums(g, o), [o]));
        [gx, gw1, gb1, gw2, gb2]
    }
}

/// Returns the hidden layer before and after its GELU, `[M, H]` each.
fn hidden_layer<T: Number>(x: &[T], weight: Weights<'_>, bias: &[f32], mdh: [usize; 3]) -> (Vec<T>, Vec<T>) {
    let f32s = T::DTYPE == DType::F32;
    // In f32, adding the bias in the same pass as the GELU is cheaper. In bf16, it is added before
    // the only rounding.
    let mut h = if f32s { times_transposed(x, weight, mdh) } else { affine(x, weight, bias, mdh) };
    let mut a = vec![T::default(); h.len()];
    let rows = h.par_chunks_exact_mut(bias.len()).zip(a.par_chunks_exact_mut(bias.len()));
    rows.for_each(|(h, a)| {
        if f32s {
            add(bytemuck::cast_slice_mut(h), bias);
        }
        gelu::forward(h, a);
    });
    (h, a)
}

/// Replaces `h` by its GELU, multiplies `grad` by the slope, and returns the column sums of the
/// latter.
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
    use crate::ops::twin::{assert_close, devices, leaves, types};

    #[test]
    fn it_equals_its_twin_forwards_and_backwards() {
        for device in devices() {
            for (dtype, tolerance) in types(&device, 3e-6) {
                let sizes = [[3, 4, 19, 11, 19], [2, 83, 32, 130, 24]];
                sizes.iter().for_each(|sizes| check(&device, *sizes, dtype, tolerance));
            }
        }
    }

    fn check(device: &Device, [b, n, d, hidden, o]: [usize; 5], dtype: DType, tolerance: f32) {
        let x = leaves(device, &[[b, n, d]], 1).remove(0);
        let weights = leaves(device, &[[hidden, d], [o, hidden]], 2);
        let biases = leaves(device, &[[hidden], [o]], 3);
        let layer = |i: usize| (weights[i].clone(), biases[i].clone());
        let gradients = |y: Tensor<3>| {
            let grads = (y.clone() * y.clone().inner().autodiff()).sum().backward();
            let of_weights = weights.iter().map(|w| w.grad(&grads).expect("leaf").flatten::<1>(0, 1));
            let of_biases = biases.iter().map(|b| b.grad(&grads).expect("leaf"));
            (y.inner(), x.grad(&grads).expect("leaf"), of_weights.chain(of_biases).collect::<Vec<_>>())
        };
        let ours = gradients(mlp(cast(x.clone(), dtype), layer(0), layer(1)));
        let twin = gradients(plain(cast(x.clone(), dtype), layer(0), layer(1)));
        assert_eq!(ours.0.dtype(), dtype);
        assert_close("forward", ours.0, twin.0, tolerance / 1.5);
        assert_close("input", ours.1, twin.1, tolerance);
        assert!(ours.2.iter().all(|grad| grad.dtype() == DType::F32));
        for (i, (a, b)) in ours.2.into_iter().zip(twin.2).enumerate() {
            assert_close(["W1", "W2", "b1", "b2"][i], a, b, tolerance);
        }
    }
}
