//! [`layer_norm`](crate::ops::layer_norm). The lanes of a row compute its moments; the parameters'
//! gradients are summed over blocks of rows.
//!
//! ```text
//! x̂  = (x - mean(x)) · r        r = 1 / √(var(x) + ε)     moments [rows, 2]: mean and r
//! y  = x̂ · γ + β                                          x, y [.., D]
//! gx = s + r · (h - mean(h) - x̂ · mean(h · x̂))            h = g · γ
//! gγ = Σ_rows g · x̂             gβ = Σ_rows g             [D]
//! ```
//!
//! s is the gradient of a skip connection, zero if there is none.

use burn_backend::TensorMetadata;
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::DType;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::accumulate::add_block_sums;
use super::lanes;
use super::lanes::Lanes;
use super::{Rows, cast, cube_count, elem, empty, one_unit_each, vector_size};
use crate::ops::bridge::Kernel;
use crate::ops::link::Link;
use crate::ops::places::GradientPlace;

/// Number of rows of a block.
const BLOCK: usize = 64;

/// Kernels of the forward and backward pass.
#[derive(Debug, Clone)]
pub(in crate::ops) struct LayerNorm {
    pub(in crate::ops) epsilon: f32,
    /// Type of y.
    pub(in crate::ops) output: DType,
    /// Link through which the end of a branch passes the gradient of its skip connection.
    pub(in crate::ops) link: Option<Link<CubeTensor>>,
}

/// The input, the moments `[rows, 2]`, and γ.
type Saved = (CubeTensor, CubeTensor, CubeTensor);

impl Kernel<CubeBackend, 3> for LayerNorm {
    type Saved = Saved;

    fn forward(&self, [x, gamma, beta]: [CubeTensor; 3]) -> (CubeTensor, Saved) {
        let x = Rows::new(&x);
        let gamma = Rows::new(&gamma);
        let beta = Rows::new(&beta);
        let y = Rows::new(&empty(&x.tensor, x.tensor.shape(), self.output));
        let moments = empty(&x.tensor, [x.n_rows, 2], DType::F32);
        let n = vector_size(&[&x, &y, &gamma, &beta]);
        let client = &x.tensor.client;
        let lanes = Lanes::for_client(client);
        layer_norm_forward::launch(
            client,
            cube_count(client, Lanes::n_cubes(x.n_rows)),
            lanes.dim(),
            n,
            x.arg(),
            gamma.arg(),
            beta.arg(),
            y.arg(),
            moments.clone().into_buffer_arg(),
            x.stride / n,
            y.stride / n,
            x.n_rows,
            self.epsilon,
            x.d / n,
            lanes,
            elem(&x.tensor),
            elem(&gamma.tensor),
            elem(&y.tensor),
        );
        (y.tensor, (x.tensor, moments, gamma.tensor))
    }

    fn backward(&self, saved: Saved, grad: CubeTensor, wanted: [bool; 3]) -> [Option<CubeTensor>; 3] {
        let (x, moments, gamma) = saved;
        let x = Rows::new(&x);
        let grad = Rows::new(&grad);
        let gamma = Rows::new(&gamma);
        let skip = self.link.as_ref().and_then(Link::take);
        let gx = wanted[0].then(|| input_gradient(&x, &moments, &gamma, &grad, skip.as_ref()));
        if !(wanted[1] || wanted[2]) {
            return [gx, None, None];
        }
        let sums = CubeBackend::float_sum_dim(parameter_gradients(&x, &moments, &grad).tensor, 0);
        let dtype = gamma.tensor.dtype;
        let ggamma = wanted[1].then(|| cast(row_of_sums(&sums, 0, x.d), dtype));
        let gbeta = wanted[2].then(|| cast(row_of_sums(&sums, 1, x.d), dtype));
        [gx, ggamma, gbeta]
    }

    /// Adds the gradients of γ and β to their places, if both have one.
    fn backward_to(
        &self,
        saved: Saved,
        grad: CubeTensor,
        wanted: [bool; 3],
        places: [Option<GradientPlace>; 3],
    ) -> [Option<CubeTensor>; 3] {
        let [_, Some(gamma_place), Some(beta_place)] = places else {
            return self.backward(saved, grad, wanted);
        };
        let partial = parameter_gradients(&Rows::new(&saved.0), &saved.1, &Rows::new(&grad));
        add_block_sums(&partial.tensor, &[&gamma_place, &beta_place]);
        self.backward(saved, grad, [wanted[0], false, false])
    }
}

/// Returns row `index`, `[D]`, of the sums of gγ and gβ, `[1, 2, D]`.
fn row_of_sums(sums: &CubeTensor, index: usize, d: usize) -> CubeTensor {
    let rows = CubeBackend::float_reshape(sums.clone(), [2, d].into());
    let row = CubeBackend::float_slice(rows, &[(index..index + 1).into(), (0..d).into()]);
    CubeBackend::float_reshape(row, [d].into())
}

fn input_gradient(
    x: &Rows,
    moments: &CubeTensor,
    gamma: &Rows,
    grad: &Rows,
    skip: Option<&CubeTensor>,
) -> CubeTensor {
    let gx = x.empty_like();
    // Without a skip connection, a buffer of the right type that is not read.
    let skipped = skip.map_or_else(|| x.clone(), Rows::new);
    let n = vector_size(&[x, grad, &gx, gamma, &skipped]);
    let client = &x.tensor.client;
    let lanes = Lanes::for_client(client);
    layer_norm_backward::launch(
        client,
        cube_count(client, Lanes::n_cubes(x.n_rows)),
        lanes.dim(),
        n,
        x.arg(),
        moments.clone().into_buffer_arg(),
        gamma.arg(),
        grad.arg(),
        skipped.arg(),
        gx.arg(),
        x.stride / n,
        grad.stride / n,
        skipped.stride / n,
        gx.stride / n,
        x.n_rows,
        x.d / n,
        skip.is_some(),
        lanes,
        elem(&x.tensor),
        elem(&gamma.tensor),
        elem(&grad.tensor),
    );
    gx.tensor
}

/// Returns the sums of gγ and gβ over blocks of rows, `[blocks, 2, D]` in f32.
fn parameter_gradients(x: &Rows, moments: &CubeTensor, grad: &Rows) -> Rows {
    let n_blocks = x.n_rows.div_ceil(BLOCK);
    let partial = Rows::new(&empty(&x.tensor, [n_blocks, 2, x.d], DType::F32));
    // At most four bytes per read: with wider reads there would be too few units.
    let n = vector_size(&[x, grad, &partial]).min((4 / x.tensor.dtype.size()).max(1));
    let client = &x.tensor.client;
    let (count, dim) = one_unit_each(client, n_blocks * x.d / n);
    layer_norm_sums::launch(
        client,
        count,
        dim,
        n,
        x.arg(),
        moments.clone().into_buffer_arg(),
        grad.arg(),
        partial.arg(),
        x.stride / n,
        grad.stride / n,
        x.n_rows,
        x.d / n,
        elem(&x.tensor),
        elem(&grad.tensor),
    );
    partial
}

#[cube(launch)]
fn layer_norm_forward<F: Float, G: Float, O: Float, N: Size>(
    x: &[Vector<F, N>],
    gamma: &[Vector<G, N>],
    beta: &[Vector<G, N>],
    y: &mut [Vector<O, N>],
    moments: &mut [f32],
    x_stride: usize,
    y_stride: usize,
    n_rows: usize,
    epsilon: f32,
    #[comptime] n_vectors: usize,
    #[comptime] lanes: Lanes,
    #[define(F)] _dtype: ElemType,
    #[define(G)] _parameters: ElemType,
    #[define(O)] _output: ElemType,
) {
    let row = lanes::row();
    let lane = UNIT_POS_X as usize;
    let d = f32::cast_from(n_vectors * N::value());
    // Units beyond the last row compute the last one: all units must take part in the sums.
    let start = min(row, n_rows - 1) * x_stride;

    let mut total = Vector::<f32, N>::new(0.0f32);
    for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
        total += Vector::cast_from(x[start + i]);
    }
    let mean = lanes::sum(total.vector_sum(), lanes) / d;

    let mut squares = Vector::<f32, N>::new(0.0f32);
    for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
        let centered = Vector::<f32, N>::cast_from(x[start + i]) - Vector::new(mean);
        squares += centered * centered;
    }
    let factor = 1.0f32 / (lanes::sum(squares.vector_sum(), lanes) / d + epsilon).sqrt();

    if row < n_rows {
        for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
            let normalized =
                (Vector::<f32, N>::cast_from(x[start + i]) - Vector::new(mean)) * Vector::new(factor);
            let scaled = normalized * Vector::cast_from(gamma[i]) + Vector::cast_from(beta[i]);
            y[row * y_stride + i] = Vector::cast_from(scaled);
        }
        if lane == 0 {
            moments[2 * row] = mean;
            moments[2 * row + 1] = factor;
        }
    }
}

#[cube(launch)]
fn layer_norm_backward<F: Float, G: Float, O: Float, N: Size>(
    x: &[Vector<F, N>],
    moments: &[f32],
    gamma: &[Vector<G, N>],
    grad: &[Vector<O, N>],
    skipped: &[Vector<F, N>],
    gx: &mut [Vector<F, N>],
    x_stride: usize,
    grad_stride: usize,
    skipped_stride: usize,
    gx_stride: usize,
    n_rows: usize,
    #[comptime] n_vectors: usize,
    #[comptime] adds: bool,
    #[comptime] lanes: Lanes,
    #[define(F)] _dtype: ElemType,
    #[define(G)] _parameters: ElemType,
    #[define(O)] _output: ElemType,
) {
    let row = lanes::row();
    let lane = UNIT_POS_X as usize;
    let d = f32::cast_from(n_vectors * N::value());
    let read_row = min(row, n_rows - 1);
    let mean = moments[2 * read_row];
    let factor = moments[2 * read_row + 1];

    let mut total = Vector::<f32, N>::new(0.0f32);
    let mut dot = Vector::<f32, N>::new(0.0f32);
    for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
        let normalized = (Vector::<f32, N>::cast_from(x[read_row * x_stride + i]) - Vector::new(mean))
            * Vector::new(factor);
        let g = Vector::<f32, N>::cast_from(grad[read_row * grad_stride + i]) * Vector::cast_from(gamma[i]);
        total += g;
        dot += g * normalized;
    }
    let total = lanes::sum(total.vector_sum(), lanes) / d;
    let dot = lanes::sum(dot.vector_sum(), lanes) / d;

    if row < n_rows {
        for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
            let normalized = (Vector::<f32, N>::cast_from(x[row * x_stride + i]) - Vector::new(mean))
                * Vector::new(factor);
            let g = Vector::<f32, N>::cast_from(grad[row * grad_stride + i]) * Vector::cast_from(gamma[i]);
            let mut total_grad =
                (g - Vector::new(total) - normalized * Vector::new(dot)) * Vector::new(factor);
            if adds {
                total_grad += Vector::cast_from(skipped[row * skipped_stride + i]);
            }
            gx[row * gx_stride + i] = Vector::cast_from(total_grad);
        }
    }
}

/// Sums g · x̂ and g over blocks of rows: a unit sums some columns of one block.
#[cube(launch)]
fn layer_norm_sums<F: Float, O: Float, N: Size>(
    x: &[Vector<F, N>],
    moments: &[f32],
    grad: &[Vector<O, N>],
    sums: &mut [Vector<f32, N>],
    x_stride: usize,
    grad_stride: usize,
    n_rows: usize,
    #[comptime] n_vectors: usize,
    #[define(F)] _dtype: ElemType,
    #[define(O)] _output: ElemType,
) {
    let block = ABSOLUTE_POS / n_vectors;
    let column = ABSOLUTE_POS % n_vectors;
    let first = block * BLOCK;
    if first < n_rows {
        let mut gamma_sum = Vector::<f32, N>::new(0.0f32);
        let mut beta_sum = Vector::<f32, N>::new(0.0f32);
        for row in first..min(first + BLOCK, n_rows) {
            let centered =
                Vector::<f32, N>::cast_from(x[row * x_stride + column]) - Vector::new(moments[2 * row]);
            let g = Vector::<f32, N>::cast_from(grad[row * grad_stride + column]);
            gamma_sum += g * centered * Vector::new(moments[2 * row + 1]);
            beta_sum += g;
        }
        sums[2 * block * n_vectors + column] = gamma_sum;
        sums[(2 * block + 1) * n_vectors + column] = beta_sum;
    }
}
