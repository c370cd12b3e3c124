//! [`swiglu`](crate::ops::swiglu) in one pass in each direction.
//!
//! ```text
//! y  = a · σ(a) · b                          x = [a; b] [.., 2·H], rows at any stride   y [.., H]
//! ga = g · b · σ(a) · (1 + a · (1 - σ(a)))   gb = g · a · σ(a)
//! ```

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::{Rows, elem, empty, one_unit_each, vector_size};
use crate::ops::bridge::Kernel;

/// Kernels of the forward and backward pass.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Swiglu;

impl Kernel<CubeBackend, 1> for Swiglu {
    type Saved = CubeTensor;

    fn forward(&self, [x]: [CubeTensor; 1]) -> (CubeTensor, CubeTensor) {
        let rows = Rows::new(&x);
        let mut shape = rows.tensor.meta.shape().clone();
        let last = shape.num_dims() - 1;
        shape[last] = rows.d / 2;
        let y = Rows::new(&empty(&rows.tensor, shape, rows.tensor.dtype));
        let n = vector_size(&[&rows, &y]);
        let client = &x.client;
        let (count, dim) = one_unit_each(client, y.n_rows * y.d / n);
        swiglu_forward::launch(
            client,
            count,
            dim,
            n,
            rows.arg(),
            y.arg(),
            rows.stride / n,
            y.stride / n,
            y.n_rows,
            y.d / n,
            elem(&x),
        );
        (y.tensor, rows.tensor)
    }

    fn backward(&self, x: CubeTensor, grad: CubeTensor, _: [bool; 1]) -> [Option<CubeTensor>; 1] {
        let x = Rows::new(&x);
        let grad = Rows::new(&grad);
        let gx = x.empty_like();
        let n = vector_size(&[&x, &grad, &gx]);
        let client = &x.tensor.client;
        let (count, dim) = one_unit_each(client, grad.n_rows * grad.d / n);
        swiglu_backward::launch(
            client,
            count,
            dim,
            n,
            x.arg(),
            grad.arg(),
            gx.arg(),
            x.stride / n,
            grad.stride / n,
            gx.stride / n,
            grad.n_rows,
            grad.d / n,
            elem(&x.tensor),
        );
        [Some(gx.tensor)]
    }
}

/// Logistic function, σ(a).
#[cube]
fn logistic<N: Size>(a: Vector<f32, N>) -> Vector<f32, N> {
    Vector::new(1.0f32) / (Vector::new(1.0f32) + Vector::exp(a * Vector::new(-1.0f32)))
}

#[cube(launch)]
fn swiglu_forward<F: Float, N: Size>(
    x: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    x_stride: usize,
    y_stride: usize,
    n_rows: usize,
    #[comptime] n_vectors: usize,
    #[define(F)] _dtype: ElemType,
) {
    let row = ABSOLUTE_POS / n_vectors;
    let column = ABSOLUTE_POS % n_vectors;
    if row < n_rows {
        let a = Vector::<f32, N>::cast_from(x[row * x_stride + column]);
        let b = Vector::<f32, N>::cast_from(x[row * x_stride + n_vectors + column]);
        y[row * y_stride + column] = Vector::cast_from(a * logistic::<N>(a) * b);
    }
}

#[cube(launch)]
fn swiglu_backward<F: Float, N: Size>(
    x: &[Vector<F, N>],
    grad: &[Vector<F, N>],
    gx: &mut [Vector<F, N>],
    x_stride: usize,
    grad_stride: usize,
    gx_stride: usize,
    n_rows: usize,
    #[comptime] n_vectors: usize,
    #[define(F)] _dtype: ElemType,
) {
    let row = ABSOLUTE_POS / n_vectors;
    let column = ABSOLUTE_POS % n_vectors;
    if row < n_rows {
        let a = Vector::<f32, N>::cast_from(x[row * x_stride + column]);
        let b = Vector::<f32, N>::cast_from(x[row * x_stride + n_vectors + column]);
        let g = Vector::<f32, N>::cast_from(grad[row * grad_stride + column]);
        let sigma = logistic::<N>(a);
        let slope = Vector::new(1.0f32) + a * (Vector::new(1.0f32) - sigma);
        gx[row * gx_stride + column] = Vector::cast_from(g * b * sigma * slope);
        gx[row * gx_stride + n_vectors + column] = Vector::cast_from(g * a * sigma);
    }
}
