//! [`cross_entropy`](crate::ops::cross_entropy) in one pass over the scores in each direction. The
//! lanes of a row of scores compute its loss.
//!
//! ```text
//! L_r = W · l - Σ_k w[k] · s[k] / τ       l = log Σ_k exp(s[k] / τ)      w, W as in the operation
//! gs  = (W · exp(s / τ - l) - w) · g / τ  g the gradient of the sum of all L_r
//! ```

use burn_backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::DType;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::lanes;
use super::lanes::Lanes;
use super::{Rows, cube_count, elem, empty, vector_size};
use crate::ops::bridge::Kernel;

/// Kernels of the forward and backward pass.
#[derive(Debug, Clone)]
pub(in crate::ops) struct CrossEntropy {
    /// Whether a view is also paired with the target of the same view.
    pub(in crate::ops) pairs_same_view: bool,
    /// 1 / τ.
    pub(in crate::ops) inverse: f32,
}

impl Kernel<CubeBackend, 2> for CrossEntropy {
    /// Scores, targets, and l and W of each row, `[rows, 2]`.
    type Saved = [CubeTensor; 3];

    fn forward(&self, [scores, targets]: [CubeTensor; 2]) -> (CubeTensor, Self::Saved) {
        let n_views = scores.meta.shape()[1];
        let n_targets = targets.meta.shape()[1];
        let scores = Rows::new(&scores);
        let targets = Rows::new(&targets);
        let stats = empty(&scores.tensor, [scores.n_rows, 2], DType::F32);
        let losses = empty(&scores.tensor, [scores.n_rows], DType::F32);
        let n = vector_size(&[&scores, &targets]);
        let client = &scores.tensor.client;
        let lanes = Lanes::for_client(client);
        row_losses::launch(
            client,
            cube_count(client, Lanes::n_cubes(scores.n_rows)),
            lanes.dim(),
            n,
            scores.arg(),
            targets.arg(),
            stats.clone().into_buffer_arg(),
            losses.clone().into_buffer_arg(),
            scores.stride / n,
            targets.stride / n,
            scores.n_rows,
            n_views,
            n_targets,
            self.inverse,
            scores.d / n,
            self.pairs_same_view,
            lanes,
            elem(&scores.tensor),
            elem(&targets.tensor),
        );
        let total = empty(&scores.tensor, [1], DType::F32);
        sum_of_losses::launch(
            client,
            CubeCount::Static(1, 1, 1),
            lanes.dim(),
            losses.into_buffer_arg(),
            total.clone().into_buffer_arg(),
            scores.n_rows,
            lanes,
        );
        (total, [scores.tensor, targets.tensor, stats])
    }

    fn backward(
        &self,
        [scores, targets, stats]: Self::Saved,
        grad: CubeTensor,
        wanted: [bool; 2],
    ) -> [Option<CubeTensor>; 2] {
        if !wanted[0] {
            return [None, None];
        }
        let n_views = scores.meta.shape()[1];
        let n_targets = targets.meta.shape()[1];
        let scores = Rows::new(&scores);
        let targets = Rows::new(&targets);
        let gs = Rows::new(&empty(&scores.tensor, scores.tensor.shape(), scores.tensor.dtype));
        let n = vector_size(&[&scores, &targets, &gs]);
        let client = &scores.tensor.client;
        let lanes = Lanes::for_client(client);
        score_gradients::launch(
            client,
            cube_count(client, Lanes::n_cubes(scores.n_rows)),
            lanes.dim(),
            n,
            scores.arg(),
            targets.arg(),
            stats.into_buffer_arg(),
            grad.into_buffer_arg(),
            gs.arg(),
            scores.stride / n,
            targets.stride / n,
            gs.stride / n,
            scores.n_rows,
            n_views,
            n_targets,
            self.inverse,
            scores.d / n,
            self.pairs_same_view,
            lanes,
            elem(&scores.tensor),
            elem(&targets.tensor),
        );
        [Some(gs.tensor), None]
    }
}

/// Returns a vector of w: the sum of the targets of the row's image, without that of the same view
/// unless `pairs_same_view`.
#[cube]
fn paired_targets<T: Float, N: Size>(
    targets: &[Vector<T, N>],
    stride: usize,
    row: usize,
    vector: usize,
    n_views: usize,
    n_targets: usize,
    #[comptime] pairs_same_view: bool,
) -> Vector<f32, N> {
    let image = row / n_views;
    let view = row % n_views;
    let mut total = Vector::<f32, N>::new(0.0f32);
    for target in 0..n_targets {
        if pairs_same_view || target != view {
            total += Vector::cast_from(targets[(image * n_targets + target) * stride + vector]);
        }
    }
    total
}

#[cube(launch)]
fn row_losses<F: Float, T: Float, N: Size>(
    scores: &[Vector<F, N>],
    targets: &[Vector<T, N>],
    stats: &mut [f32],
    losses: &mut [f32],
    scores_stride: usize,
    targets_stride: usize,
    n_rows: usize,
    n_views: usize,
    n_targets: usize,
    inverse: f32,
    #[comptime] n_vectors: usize,
    #[comptime] pairs_same_view: bool,
    #[comptime] lanes: Lanes,
    #[define(F)] _scores: ElemType,
    #[define(T)] _targets: ElemType,
) {
    let row = lanes::row();
    let lane = UNIT_POS_X as usize;
    // Units beyond the last row compute the last one: all units must take part in the reductions.
    let read_row = min(row, n_rows - 1);

    let mut maxima = Vector::<f32, N>::new(-1e30f32);
    for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
        maxima = max(maxima, Vector::cast_from(scores[read_row * scores_stride + i]));
    }
    let mut maximum = maxima.extract(0usize);
    #[unroll]
    for k in 1..N::value() {
        maximum = max(maximum, maxima.extract(k));
    }
    let maximum = lanes::largest(maximum, lanes);

    let mut exps = Vector::<f32, N>::new(0.0f32);
    let mut weight = Vector::<f32, N>::new(0.0f32);
    let mut dot = Vector::<f32, N>::new(0.0f32);
    for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
        let score = Vector::<f32, N>::cast_from(scores[read_row * scores_stride + i]);
        let shifted = (score - Vector::new(maximum)) * Vector::new(inverse);
        let w =
            paired_targets::<T, N>(targets, targets_stride, read_row, i, n_views, n_targets, pairs_same_view);
        exps += Vector::exp(shifted);
        weight += w;
        dot += w * shifted;
    }
    let log_sum = lanes::sum(exps.vector_sum(), lanes).ln();
    let weight = lanes::sum(weight.vector_sum(), lanes);
    let dot = lanes::sum(dot.vector_sum(), lanes);

    if row < n_rows && lane == 0 {
        losses[row] = weight * log_sum - dot;
        stats[2 * row] = log_sum + maximum * inverse;
        stats[2 * row + 1] = weight;
    }
}

/// Sums the losses of all rows in the first row of lanes, in a fixed order.
#[cube(launch)]
fn sum_of_losses(losses: &[f32], total: &mut [f32], n_rows: usize, #[comptime] lanes: Lanes) {
    let lane = UNIT_POS_X as usize;
    let mut sum = 0.0f32;
    for i in range_stepped(lane, n_rows, comptime!(lanes.n)) {
        sum += losses[i];
    }
    let sum = lanes::sum(sum, lanes);
    if lane == 0 && UNIT_POS_Y == 0 {
        total[0] = sum;
    }
}

#[cube(launch)]
fn score_gradients<F: Float, T: Float, N: Size>(
    scores: &[Vector<F, N>],
    targets: &[Vector<T, N>],
    stats: &[f32],
    grad: &[f32],
    gs: &mut [Vector<F, N>],
    scores_stride: usize,
    targets_stride: usize,
    gs_stride: usize,
    n_rows: usize,
    n_views: usize,
    n_targets: usize,
    inverse: f32,
    #[comptime] n_vectors: usize,
    #[comptime] pairs_same_view: bool,
    #[comptime] lanes: Lanes,
    #[define(F)] _scores: ElemType,
    #[define(T)] _targets: ElemType,
) {
    let row = lanes::row();
    let lane = UNIT_POS_X as usize;
    if row < n_rows {
        let log_sum = stats[2 * row];
        let weight = stats[2 * row + 1];
        let scale = grad[0] * inverse;
        for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
            let score = Vector::<f32, N>::cast_from(scores[row * scores_stride + i]);
            let probability = Vector::exp(score * Vector::new(inverse) - Vector::new(log_sum));
            let w =
                paired_targets::<T, N>(targets, targets_stride, row, i, n_views, n_targets, pairs_same_view);
            let g = (probability * Vector::new(weight) - w) * Vector::new(scale);
            gs[row * gs_stride + i] = Vector::cast_from(g);
        }
    }
}
