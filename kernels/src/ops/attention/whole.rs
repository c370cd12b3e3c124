//! Attention of short sequences: the weights of a head, `[N, N]`, are computed as a whole and kept
//! for the backward pass.

use multiversion::multiversion;

use super::heads::Sizes;
use crate::ops::cpu_product::{Start, product_into};
use crate::ops::gemm::Mat;
use crate::ops::math::exp;
use crate::ops::number::Number;

/// Computes the attention of a sequence: from `[N, 3·D]` to weights `[H, N, N]` and output
/// `[N, D]`.
pub(super) fn attend<T: Number>(
    sizes: Sizes,
    qkv: &[T],
    weights: &mut [T],
    y: &mut [T],
    scores: &mut Vec<f32>,
) {
    let n = sizes.n_tokens;
    let d_head = sizes.d_head;
    scores.resize(n * n, 0.0);
    for (head, weights) in weights.chunks_exact_mut(n * n).enumerate() {
        let q = sizes.head(qkv, 0, head);
        let k = sizes.head(qkv, 1, head);
        let v = sizes.head(qkv, 2, head);
        product_into([n, d_head, n], sizes.scale(), q, k.t(), Start::Zero, scores, n);
        softmax_rows(scores, weights, n);
        let y = &mut y[head * d_head..];
        product_into([n, n, d_head], 1.0, Mat::rows(weights, n), v, Start::Zero, y, sizes.d());
    }
}

/// Computes the gradient of `qkv` of a sequence, `[N, 3·D]`, given the weights and the gradient of
/// the output.
pub(super) fn attend_backward<T: Number>(
    sizes: Sizes,
    qkv: &[T],
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
        let q = sizes.head(qkv, 0, head);
        let k = sizes.head(qkv, 1, head);
        let v = sizes.head(qkv, 2, head);
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
pub(super) fn fold_lanes(
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
