//! Multi-head self-attention between the projections.
//!
//! ```text
//! Q, K, V = split(qkv)                per image and head [N, D_h]
//! P  = softmax(Q · Kᵀ / √D_h)         [N, N]
//! y  = P · V
//! gV = Pᵀ · g     gP = g · Vᵀ     gS = P ∘ (gP - rowsum(gP ∘ P)) / √D_h
//! gQ = gS · K     gK = gSᵀ · Q
//! ```
//!
//! `qkv` is the output of one linear layer, `[B, N, 3·H·D_h]`, with the order (q, k, v), head,
//! channel in its last dimension, as in timm and DINO. The CPU kernel reads heads with strides,
//! without permuting or copying them.

use std::marker::PhantomData;
use std::sync::Arc;

use burn_flex::Flex;
use burn_flex::FlexTensor;
use burn_tensor::{DType, Tensor, activation};
use half::bf16;
use multiversion::multiversion;
use rayon::prelude::*;

use super::bridge::{Kernel, run};
use super::cpu::{contiguous, dims, elements, flex_dtype, tensor};
use super::cpu_product::{Start, product_into};
#[cfg(feature = "cube")]
use super::cube;
use super::gemm::Mat;
use super::in_f32;
use super::lengths::Lengths;
use super::math::exp;
use super::number::Number;

/// Returns the attention of `n_heads` heads over the sequences in `qkv` of `[T, 3·D]`: `[T, D]`.
pub fn attention(qkv: Tensor<2>, lengths: &Lengths, n_heads: usize) -> Tensor<2> {
    let [n_tokens, d3] = qkv.dims();
    let mut start = 0;
    let mut outputs = Vec::with_capacity(lengths.runs().len());
    for run in lengths.runs() {
        let len = run.n_sequences * run.length;
        let part = if len == n_tokens { qkv.clone() } else { qkv.clone().narrow(0, start, len) };
        let y = sequence_attention(part.reshape([run.n_sequences, run.length, d3]), n_heads);
        outputs.push(y.reshape([len, d3 / 3]));
        start += len;
    }
    if outputs.len() == 1 { outputs.remove(0) } else { Tensor::cat(outputs, 0) }
}

/// Returns the weights of the first token of each sequence in `qkv` of `[S·N, 3·D]` on all of its
/// tokens: `[S, H, N]` in f32.
pub fn class_attention(qkv: Tensor<2>, lengths: &Lengths, n_heads: usize) -> Tensor<3> {
    let [n_tokens, d3] = qkv.dims();
    let s = lengths.n_sequences();
    let weights = attention_weights(qkv.reshape([s, n_tokens / s, d3]), n_heads);
    weights.narrow(2, 0, 1).squeeze_dim(2)
}

/// Returns the attention of `n_heads` heads over `qkv` of `[B, N, 3·D]`, `[B, N, D]`.
fn sequence_attention(qkv: Tensor<3>, n_heads: usize) -> Tensor<3> {
    #[cfg(feature = "cube")]
    if cube::is_cube(&qkv) {
        return run(cube::Attention { n_heads }, [qkv.into()]);
    }
    match flex_dtype(&qkv) {
        Some(DType::F32) => run(Attention::<f32> { n_heads, numbers: PhantomData }, [qkv.into()]),
        Some(DType::BF16) => run(Attention::<bf16> { n_heads, numbers: PhantomData }, [qkv.into()]),
        _ => plain(qkv, n_heads),
    }
}

/// Returns the weights P of `n_heads` heads over `qkv` of `[B, N, 3·D]`: `[B, H, N, N]` in f32, one
/// row for each query.
fn attention_weights(qkv: Tensor<3>, n_heads: usize) -> Tensor<4> {
    let [_, _, d3] = qkv.dims();
    let q = in_f32(part(qkv.clone(), n_heads, 0));
    let k = in_f32(part(qkv, n_heads, 1));
    let scale = ((d3 / 3 / n_heads) as f64).powf(-0.5);
    activation::softmax(q.matmul(k.swap_dims(2, 3)) * scale, 3)
}

/// Computes scores and softmax in f32, and the product with V in the type of `qkv`.
fn plain(qkv: Tensor<3>, n_heads: usize) -> Tensor<3> {
    let [b, n, d3] = qkv.dims();
    let weights = attention_weights(qkv.clone(), n_heads).cast(qkv.dtype());
    weights.matmul(part(qkv, n_heads, 2)).swap_dims(1, 2).reshape([b, n, d3 / 3])
}

/// Returns Q, K or V (`index` 0, 1 or 2) of `qkv`: `[B, H, N, D_h]`.
fn part(qkv: Tensor<3>, n_heads: usize, index: usize) -> Tensor<4> {
    let [b, n, d3] = qkv.dims();
    let parts = qkv.reshape([b, n, 3, n_heads, d3 / 3 / n_heads]).permute([2, 0, 3, 1, 4]);
    parts.narrow(0, index, 1).squeeze_dim(0)
}

/// Kernel for `qkv` with elements of type `T`; scores and softmax are f32.
#[derive(Debug, Clone)]
struct Attention<T> {
    n_heads: usize,
    numbers: PhantomData<T>,
}

/// The input and the attention weights `[B, H, N, N]`.
type Saved<T> = (FlexTensor, Arc<Vec<T>>);

/// Sizes of one image.
#[derive(Clone, Copy)]
struct Sizes {
    n_tokens: usize,
    n_heads: usize,
    d_head: usize,
}

impl Sizes {
    fn d(&self) -> usize {
        self.n_heads * self.d_head
    }

    fn scale(&self) -> f32 {
        (self.d_head as f32).powf(-0.5)
    }

    /// Returns Q, K or V (`part` 0, 1, 2) of one head, in the rows of an image of `qkv`.
    fn head<'a, T>(&self, image: &'a [T], part: usize, head: usize) -> Mat<'a, T> {
        Mat::rows(&image[part * self.d() + head * self.d_head..], 3 * self.d())
    }
}

impl<T: Number> Kernel<Flex, 1> for Attention<T> {
    type Saved = Saved<T>;

    fn forward(&self, [qkv]: [FlexTensor; 1]) -> (FlexTensor, Saved<T>) {
        let [n_images, n_tokens, d3]: [usize; 3] = dims(&qkv);
        let n_heads = self.n_heads;
        let d_head = d3 / 3 / self.n_heads;
        let sizes = Sizes { n_tokens, n_heads, d_head };
        let qkv = contiguous(&qkv);
        let mut y = vec![T::default(); n_images * n_tokens * sizes.d()];
        let mut weights = vec![T::default(); n_images * n_heads * n_tokens * n_tokens];
        let images = elements::<T>(&qkv).par_chunks_exact(n_tokens * d3);
        images
            .zip(weights.par_chunks_exact_mut(n_heads * n_tokens * n_tokens))
            .zip(y.par_chunks_exact_mut(n_tokens * sizes.d()))
            .for_each_init(Vec::new, |scores, ((image, weights), y)| {
                attend(sizes, image, weights, y, scores)
            });
        (tensor(y, [n_images, n_tokens, sizes.d()]), (qkv, Arc::new(weights)))
    }

    fn backward(&self, (qkv, weights): Saved<T>, grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let [n_images, n_tokens, d]: [usize; 3] = dims(&grad);
        let sizes = Sizes { n_tokens, n_heads: self.n_heads, d_head: d / self.n_heads };
        let grad = contiguous(&grad);
        let mut out = vec![T::default(); n_images * n_tokens * 3 * d];
        out.par_chunks_exact_mut(n_tokens * 3 * d)
            .zip(elements::<T>(&qkv).par_chunks_exact(n_tokens * 3 * d))
            .zip(elements::<T>(&grad).par_chunks_exact(n_tokens * d))
            .zip(weights.par_chunks_exact(self.n_heads * n_tokens * n_tokens))
            .for_each_init(Vec::new, |scratch, (((out, image), grad), weights)| {
                attend_backward(sizes, image, weights, grad, out, scratch);
            });
        [Some(tensor(out, [n_images, n_tokens, 3 * d]))]
    }
}

/// Computes one image's attention: from `[N, 3·D]` to weights `[H, N, N]` and output `[N, D]`.
fn attend<T: Number>(sizes: Sizes, image: &[T], weights: &mut [T], y: &mut [T], scores: &mut Vec<f32>) {
    let n = sizes.n_tokens;
    let d_head = sizes.d_head;
    scores.resize(n * n, 0.0);
    for (head, weights) in weights.chunks_exact_mut(n * n).enumerate() {
        let q = sizes.head(image, 0, head);
        let k = sizes.head(image, 1, head);
        let v = sizes.head(image, 2, head);
        product_into([n, d_head, n], sizes.scale(), q, k.t(), Start::Zero, scores, n);
        softmax_rows(scores, weights, n);
        let y = &mut y[head * d_head..];
        product_into([n, n, d_head], 1.0, Mat::rows(weights, n), v, Start::Zero, y, sizes.d());
    }
}

/// Computes the gradient of one image's `qkv`, `[N, 3·D]`, given the weights and the gradient of
/// the output.
fn attend_backward<T: Number>(
    sizes: Sizes,
    image: &[T],
    weights: &[T],
    grad: &[T],
    out: &mut [T],
    scratch: &mut Vec<f32>,
) {
    let n = sizes.n_tokens;
    let d = sizes.d();
    let d_head = sizes.d_head;
    scratch.resize(n * n, 0.0);
    for (head, weights) in weights.chunks_exact(n * n).enumerate() {
        let q = sizes.head(image, 0, head);
        let k = sizes.head(image, 1, head);
        let v = sizes.head(image, 2, head);
        let g = Mat::rows(&grad[head * d_head..], d);
        let p = Mat::rows(weights, n);
        product_into([n, d_head, n], 1.0, g, v.t(), Start::Zero, scratch, n);
        softmax_gradient(weights, scratch, n, sizes.scale());
        let gs = Mat::rows(&scratch[..], n);
        let gq = &mut out[head * d_head..];
        product_into([n, n, d_head], 1.0, gs, k, Start::Zero, gq, 3 * d);
        let gk = &mut out[d + head * d_head..];
        product_into([n, n, d_head], 1.0, gs.t(), q, Start::Zero, gk, 3 * d);
        let gv = &mut out[2 * d + head * d_head..];
        product_into([n, n, d_head], 1.0, p.t(), g, Start::Zero, gv, 3 * d);
    }
}

/// Writes the softmax of every row of `scores` to `weights`; `scores` then holds the numerators.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn softmax_rows<T: Number>(scores: &mut [f32], weights: &mut [T], n: usize) {
    for row in scores.chunks_exact_mut(n) {
        let max = fold_lanes(row, f32::NEG_INFINITY, |_, v| v, f32::max);
        for value in row.iter_mut() {
            *value -= max;
        }
    }
    // Over all rows at once: a row of 37 by itself would be two vectors and five scalars.
    for value in scores.iter_mut() {
        *value = exp(*value);
    }
    for (row, weights) in scores.chunks_exact(n).zip(weights.chunks_exact_mut(n)) {
        let factor = 1.0 / fold_lanes(row, 0.0, |_, v| v, |a, b| a + b);
        for (weight, value) in weights.iter_mut().zip(row) {
            *weight = T::nearest(value * factor);
        }
    }
}

/// Replaces `grad` by `weights ∘ (grad - rowsum(grad ∘ weights)) · scale`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn softmax_gradient<T: Number>(weights: &[T], grad: &mut [f32], n: usize, scale: f32) {
    for (weights, grad) in weights.chunks_exact(n).zip(grad.chunks_exact_mut(n)) {
        let sum = fold_lanes(grad, 0.0, |i, v| v * weights[i].wide(), |a, b| a + b);
        for (grad, weight) in grad.iter_mut().zip(weights) {
            *grad = weight.wide() * (*grad - sum) * scale;
        }
    }
}

/// Folds a row in sixteen lanes, an order that vectorizes.
#[inline(always)]
fn fold_lanes(
    row: &[f32],
    start: f32,
    map: impl Fn(usize, f32) -> f32,
    fold: impl Fn(f32, f32) -> f32,
) -> f32 {
    let mut results = [start; 16];
    let full = row.len() / 16 * 16;
    for base in (0..full).step_by(16) {
        for (lane, result) in results.iter_mut().enumerate() {
            *result = fold(*result, map(base + lane, row[base + lane]));
        }
    }
    let mut result = start;
    for (i, value) in row.iter().enumerate().skip(full) {
        result = fold(result, map(i, *value));
    }
    results.into_iter().fold(result, fold)
}

#[cfg(test)]
mod tests {
    use burn_tensor::Device;

    use super::*;
    use crate::ops::cast;
    use crate::ops::testing::{assert_close, assert_gradients_close, backward, devices, leaves, types};

    /// Shapes cover numbers of tokens that are and are not multiples of eight, one token, and rows
    /// longer than the lanes of a GPU's plane.
    #[test]
    fn matches_plain_forward_and_backward() {
        for device in devices() {
            for (dtype, tolerance) in types(&device, 5e-6) {
                for shape in [[2, 21, 24], [3, 16, 48], [1, 1, 24], [1, 197, 96]] {
                    check(&device, shape, dtype, tolerance);
                }
            }
        }
    }

    fn check(device: &Device, [b, n, d]: [usize; 3], dtype: DType, tolerance: f32) {
        let qkv = leaves(device, &[[b, n, 3 * d]], 1).remove(0);
        let y = sequence_attention(cast(qkv.clone(), dtype), 3);
        let expected = plain(cast(qkv.clone(), dtype), 3);
        assert_eq!(y.dtype(), dtype);
        assert_close("forward", y.clone().inner(), expected.clone().inner(), tolerance / 2.5);
        assert_gradients_close("backward", &qkv, &backward(y), &backward(expected), tolerance);
    }

    #[test]
    fn large_scores_do_not_overflow() {
        for device in devices() {
            let qkv = leaves(&device, &[[1, 5, 3 * 8]], 2).remove(0) * 300.0;
            let y = sequence_attention(qkv, 1).inner();
            assert!(y.is_finite().all().into_scalar::<bool>());
        }
    }
}
