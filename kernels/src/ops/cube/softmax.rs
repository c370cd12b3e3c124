//! The softmax of attention scores: one pass each for the forward and the backward pass.
//!
//! ```text
//! P  = softmax(S · scale) over the first n_valid columns; the others are zero
//! gS = P ∘ (gP - rowsum(gP ∘ P)) · scale
//! ```
//!
//! S, P and their gradients are `[.., M, M']` of one type; intermediate values are f32.

use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::lanes;
use super::lanes::Lanes;
use super::{Rows, cube_count, elem, vector_size};

/// Returns P, given S.
pub(super) fn softmax(scores: CubeTensor, scale: f32, n_valid: usize) -> CubeTensor {
    let scores = Rows::new(&scores);
    let weights = scores.empty_like();
    let n = vector_size(&[&scores, &weights]);
    let client = &scores.tensor.client;
    let lanes = Lanes::for_client(client);
    softmax_forward::launch(
        client,
        cube_count(client, Lanes::n_cubes(scores.n_rows)),
        lanes.dim(),
        n,
        scores.arg(),
        weights.arg(),
        scores.stride / n,
        weights.stride / n,
        scores.n_rows,
        scale,
        n_valid,
        scores.d / n,
        lanes,
        elem(&scores.tensor),
    );
    weights.tensor
}

/// Returns gS, given P and gP.
pub(super) fn softmax_gradient(weights: &CubeTensor, grad: CubeTensor, scale: f32) -> CubeTensor {
    let weights = Rows::new(weights);
    let grad = Rows::new(&grad);
    let out = weights.empty_like();
    let n = vector_size(&[&weights, &grad, &out]);
    let client = &weights.tensor.client;
    let lanes = Lanes::for_client(client);
    softmax_backward::launch(
        client,
        cube_count(client, Lanes::n_cubes(weights.n_rows)),
        lanes.dim(),
        n,
        weights.arg(),
        grad.arg(),
        out.arg(),
        weights.stride / n,
        grad.stride / n,
        out.stride / n,
        weights.n_rows,
        scale,
        weights.d / n,
        lanes,
        elem(&weights.tensor),
    );
    out.tensor
}

/// Returns the scaled scores of a vector. Columns from `n_valid` on are set to a value below all
/// others.
#[cube]
fn scaled<F: Float, N: Size>(
    scores: Vector<F, N>,
    scale: f32,
    vector: usize,
    #[comptime] n_valid: usize,
) -> Vector<f32, N> {
    let mut values = Vector::<f32, N>::cast_from(scores) * Vector::new(scale);
    let first = vector * N::value();
    if first + N::value() > n_valid {
        #[unroll]
        for k in 0..N::value() {
            if first + k >= n_valid {
                values.insert(k, -1e30f32);
            }
        }
    }
    values
}

#[cube(launch)]
fn softmax_forward<F: Float, N: Size>(
    scores: &[Vector<F, N>],
    weights: &mut [Vector<F, N>],
    scores_stride: usize,
    weights_stride: usize,
    n_rows: usize,
    scale: f32,
    #[comptime] n_valid: usize,
    #[comptime] n_vectors: usize,
    #[comptime] lanes: Lanes,
    #[define(F)] _dtype: ElemType,
) {
    let row = lanes::row();
    let lane = UNIT_POS_X as usize;
    // Units beyond the last row compute the last one: all units must take part in the reductions.
    let start = min(row, n_rows - 1) * scores_stride;

    let mut maxima = Vector::<f32, N>::new(-1e30f32);
    for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
        maxima = max(maxima, scaled::<F, N>(scores[start + i], scale, i, n_valid));
    }
    let mut maximum = maxima.extract(0usize);
    #[unroll]
    for k in 1..N::value() {
        maximum = max(maximum, maxima.extract(k));
    }
    let maximum = lanes::largest(maximum, lanes);

    let mut total = Vector::<f32, N>::new(0.0f32);
    for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
        total += Vector::exp(scaled::<F, N>(scores[start + i], scale, i, n_valid) - Vector::new(maximum));
    }
    let factor = 1.0f32 / lanes::sum(total.vector_sum(), lanes);

    if row < n_rows {
        for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
            let weight =
                Vector::exp(scaled::<F, N>(scores[start + i], scale, i, n_valid) - Vector::new(maximum));
            weights[row * weights_stride + i] = Vector::cast_from(weight * Vector::new(factor));
        }
    }
}

#[cube(launch)]
fn softmax_backward<F: Float, N: Size>(
    weights: &[Vector<F, N>],
    grad: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    weights_stride: usize,
    grad_stride: usize,
    out_stride: usize,
    n_rows: usize,
    scale: f32,
    #[comptime] n_vectors: usize,
    #[comptime] lanes: Lanes,
    #[define(F)] _dtype: ElemType,
) {
    let row = lanes::row();
    let lane = UNIT_POS_X as usize;
    let read_row = min(row, n_rows - 1);

    let mut total = Vector::<f32, N>::new(0.0f32);
    for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
        let weight = Vector::<f32, N>::cast_from(weights[read_row * weights_stride + i]);
        total += weight * Vector::cast_from(grad[read_row * grad_stride + i]);
    }
    let total = lanes::sum(total.vector_sum(), lanes);

    if row < n_rows {
        for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
            let weight = Vector::<f32, N>::cast_from(weights[row * weights_stride + i]);
            let g = Vector::<f32, N>::cast_from(grad[row * grad_stride + i]) - Vector::new(total);
            out[row * out_stride + i] = Vector::cast_from(weight * g * Vector::new(scale));
        }
    }
}
