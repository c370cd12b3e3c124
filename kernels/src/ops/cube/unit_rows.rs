//! [`unit_rows`](crate::ops::unit_rows) in one pass in each direction. The lanes of a row compute
//! its length.
//!
//! ```text
//! y  = x · r     r = 1 / √(|x|² + ε)     x, y [M, D]   factors [M]: r
//! gx = r · (g - y (y · g))
//! ```

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
pub(in crate::ops) struct UnitRows {
    pub(in crate::ops) epsilon: f32,
}

impl Kernel<CubeBackend, 1> for UnitRows {
    /// y and r.
    type Saved = [CubeTensor; 2];

    fn forward(&self, [x]: [CubeTensor; 1]) -> (CubeTensor, Self::Saved) {
        let x = Rows::new(&x);
        let y = x.empty_like();
        let factors = empty(&x.tensor, [x.n_rows], DType::F32);
        let n = vector_size(&[&x, &y]);
        let client = &x.tensor.client;
        let lanes = Lanes::for_client(client);
        unit_rows_forward::launch(
            client,
            cube_count(client, Lanes::n_cubes(x.n_rows)),
            lanes.dim(),
            n,
            x.arg(),
            y.arg(),
            factors.clone().into_buffer_arg(),
            x.stride / n,
            y.stride / n,
            x.n_rows,
            self.epsilon,
            x.d / n,
            lanes,
            elem(&x.tensor),
        );
        (y.tensor.clone(), [y.tensor, factors])
    }

    fn backward(&self, [y, factors]: Self::Saved, grad: CubeTensor, _: [bool; 1]) -> [Option<CubeTensor>; 1] {
        let y = Rows::new(&y);
        let grad = Rows::new(&grad);
        let gx = y.empty_like();
        let n = vector_size(&[&y, &grad, &gx]);
        let client = &y.tensor.client;
        let lanes = Lanes::for_client(client);
        unit_rows_backward::launch(
            client,
            cube_count(client, Lanes::n_cubes(y.n_rows)),
            lanes.dim(),
            n,
            y.arg(),
            factors.into_buffer_arg(),
            grad.arg(),
            gx.arg(),
            y.stride / n,
            grad.stride / n,
            gx.stride / n,
            y.n_rows,
            y.d / n,
            lanes,
            elem(&y.tensor),
        );
        [Some(gx.tensor)]
    }
}

#[cube(launch)]
fn unit_rows_forward<F: Float, N: Size>(
    x: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    factors: &mut [f32],
    x_stride: usize,
    y_stride: usize,
    n_rows: usize,
    epsilon: f32,
    #[comptime] n_vectors: usize,
    #[comptime] lanes: Lanes,
    #[define(F)] _dtype: ElemType,
) {
    let row = lanes::row();
    let lane = UNIT_POS_X as usize;
    // Units beyond the last row compute the last one: all units must take part in the sums.
    let start = min(row, n_rows - 1) * x_stride;
    let mut squares = Vector::<f32, N>::new(0.0f32);
    for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
        let value = Vector::<f32, N>::cast_from(x[start + i]);
        squares += value * value;
    }
    let factor = 1.0f32 / (lanes::sum(squares.vector_sum(), lanes) + epsilon).sqrt();
    if row < n_rows {
        for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
            let value = Vector::<f32, N>::cast_from(x[start + i]);
            y[row * y_stride + i] = Vector::cast_from(value * Vector::new(factor));
        }
        if lane == 0 {
            factors[row] = factor;
        }
    }
}

#[cube(launch)]
fn unit_rows_backward<F: Float, N: Size>(
    y: &[Vector<F, N>],
    factors: &[f32],
    grad: &[Vector<F, N>],
    gx: &mut [Vector<F, N>],
    y_stride: usize,
    grad_stride: usize,
    gx_stride: usize,
    n_rows: usize,
    #[comptime] n_vectors: usize,
    #[comptime] lanes: Lanes,
    #[define(F)] _dtype: ElemType,
) {
    let row = lanes::row();
    let lane = UNIT_POS_X as usize;
    let read_row = min(row, n_rows - 1);
    let mut dot = Vector::<f32, N>::new(0.0f32);
    for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
        let value = Vector::<f32, N>::cast_from(y[read_row * y_stride + i]);
        dot += value * Vector::cast_from(grad[read_row * grad_stride + i]);
    }
    let dot = lanes::sum(dot.vector_sum(), lanes);
    if row < n_rows {
        let factor = factors[row];
        for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
            let value = Vector::<f32, N>::cast_from(y[row * y_stride + i]);
            let g = Vector::<f32, N>::cast_from(grad[row * grad_stride + i]);
            gx[row * gx_stride + i] = Vector::cast_from((g - value * Vector::new(dot)) * Vector::new(factor));
        }
    }
}
