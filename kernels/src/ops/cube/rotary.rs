//! [`rotate`](crate::ops::rotate) in one pass in each direction.
//!
//! ```text
//! y = [x₁ cos θ - x₂ sin θ; x₂ cos θ + x₁ sin θ]      θ [T, D_h / 2], by token
//! gx = the rotation of g by -θ
//! ```
//!
//! x₁ and x₂ are the halves, of D_h / 2, of a head of queries or keys. Values are copied.

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::{Rows, elem, one_unit_each};
use crate::ops::bridge::Kernel;

/// Kernels of the forward and backward pass.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Rotate {
    /// Number of attention heads.
    pub(in crate::ops) n_heads: usize,
}

impl Rotate {
    /// Rotates `qkv` of `[T, 3·H·D_h]` by `sign` times the angles with cosines `cos` and sines
    /// `sin`, both `[T, D_h / 2]`.
    fn rotated(&self, qkv: &CubeTensor, cos: &CubeTensor, sin: &CubeTensor, sign: f32) -> CubeTensor {
        let x = Rows::new(qkv);
        let cos = Rows::new(cos);
        let sin = Rows::new(sin);
        let y = x.empty_like();
        let half = x.d / 3 / self.n_heads / 2;
        let client = &qkv.client;
        let (count, dim) = one_unit_each(client, x.n_rows * x.d / 2);
        rotate_kernel::launch(
            client,
            count,
            dim,
            x.arg(),
            cos.arg(),
            sin.arg(),
            y.arg(),
            x.stride,
            y.stride,
            cos.stride,
            sin.stride,
            x.n_rows,
            sign,
            half,
            self.n_heads,
            elem(qkv),
        );
        y.tensor
    }
}

impl Kernel<CubeBackend, 3> for Rotate {
    /// Cosines and sines.
    type Saved = [CubeTensor; 2];

    fn forward(&self, [qkv, cos, sin]: [CubeTensor; 3]) -> (CubeTensor, Self::Saved) {
        (self.rotated(&qkv, &cos, &sin, 1.0), [cos, sin])
    }

    fn backward(&self, [cos, sin]: Self::Saved, grad: CubeTensor, _: [bool; 3]) -> [Option<CubeTensor>; 3] {
        [Some(self.rotated(&grad, &cos, &sin, -1.0)), None, None]
    }
}

/// Rotates one pair of channels in each unit.
#[cube(launch)]
fn rotate_kernel<F: Float>(
    x: &[F],
    cos: &[f32],
    sin: &[f32],
    y: &mut [F],
    x_stride: usize,
    y_stride: usize,
    cos_stride: usize,
    sin_stride: usize,
    n_rows: usize,
    sign: f32,
    #[comptime] half: usize,
    #[comptime] n_heads: usize,
    #[define(F)] _dtype: ElemType,
) {
    let n_pairs = comptime!(3 * n_heads * half);
    let row = ABSOLUTE_POS / n_pairs;
    let pair = ABSOLUTE_POS % n_pairs;
    if row < n_rows {
        let head = pair / half;
        let channel = pair % half;
        let x_index = row * x_stride + head * (2 * half) + channel;
        let y_index = row * y_stride + head * (2 * half) + channel;
        if head < 2 * n_heads {
            let c = cos[row * cos_stride + channel];
            let s = sin[row * sin_stride + channel] * sign;
            let first = f32::cast_from(x[x_index]);
            let second = f32::cast_from(x[x_index + half]);
            y[y_index] = F::cast_from(first * c - second * s);
            y[y_index + half] = F::cast_from(second * c + first * s);
        } else {
            y[y_index] = x[x_index];
            y[y_index + half] = x[x_index + half];
        }
    }
}
