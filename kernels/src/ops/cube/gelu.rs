//! [`gelu`](crate::ops::gelu) in one pass in each direction.
//!
//! ```text
//! y = x · Φ(x)      gx = g · (Φ(x) + x · φ(x))      elements of [.., D], rows at any stride
//! ```

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::{Rows, elem, one_unit_each, vector_size};
use crate::ops::bridge::Kernel;

/// Kernels of the forward and backward pass.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Gelu;

impl Kernel<CubeBackend, 1> for Gelu {
    type Saved = CubeTensor;

    fn forward(&self, [x]: [CubeTensor; 1]) -> (CubeTensor, CubeTensor) {
        let rows = Rows::new(&x);
        let y = rows.empty_like();
        let n = vector_size(&[&rows, &y]);
        let client = &x.client;
        let (count, dim) = one_unit_each(client, rows.n_rows * rows.d / n);
        gelu_forward::launch(
            client,
            count,
            dim,
            n,
            rows.arg(),
            y.arg(),
            rows.stride / n,
            y.stride / n,
            rows.n_rows,
            rows.d / n,
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
        let (count, dim) = one_unit_each(client, x.n_rows * x.d / n);
        gelu_backward::launch(
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
            x.n_rows,
            x.d / n,
            elem(&x.tensor),
        );
        [Some(gx.tensor)]
    }
}

/// Cumulative normal distribution, Φ(x).
#[cube]
fn cdf<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    (Vector::new(1.0f32) + Vector::erf(x * Vector::new(0.707_106_77f32))) * Vector::new(0.5f32)
}

#[cube(launch)]
fn gelu_forward<F: Float, N: Size>(
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
        let value = Vector::<f32, N>::cast_from(x[row * x_stride + column]);
        y[row * y_stride + column] = Vector::cast_from(value * cdf::<N>(value));
    }
}

#[cube(launch)]
fn gelu_backward<F: Float, N: Size>(
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
        let value = Vector::<f32, N>::cast_from(x[row * x_stride + column]);
        let g = Vector::<f32, N>::cast_from(grad[row * grad_stride + column]);
        // φ(x) = exp(-x² / 2) / √(2π)
        let density = Vector::exp(value * value * Vector::new(-0.5f32)) * Vector::new(0.398_942_3f32);
        gx[row * gx_stride + column] = Vector::cast_from(g * (cdf::<N>(value) + value * density));
    }
}
