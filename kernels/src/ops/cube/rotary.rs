//! [`rotate`](crate::ops::rotate) in one pass each way.
//!
//! ```text
//! y = [x₁ cos θ - x₂ sin θ; x₂ cos θ + x₁ sin θ]      halves of D_h / 2 of a head of queries or keys, θ [N, D_h / 2]
//! gx = the rotation of g by -θ                        prefix tokens and values are copied
//! ```

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::{Rows, elem, one_unit_each};
use crate::ops::bridge::Kernel;

/// The operation's kernels, forwards and backwards, for sequences of `n_prefix` tokens before the
/// cells.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Rotate {
    /// Number of attention heads.
    pub(in crate::ops) n_heads: usize,
    /// Number of tokens before the cells.
    pub(in crate::ops) n_prefix: usize,
}

impl Rotate {
    /// Rotates `qkv` of `[B, P + N, 3·H·D_h]` by the angles of these cosines and sines, `[N, D_h /
    /// 2]`, times `sign`.
    fn rotated(&self, qkv: &CubeTensor, [cos, sin]: [&CubeTensor; 2], sign: f32) -> CubeTensor {
        let x = Rows::of(qkv);
        let cos = Rows::of(cos);
        let sin = Rows::of(sin);
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
            qkv.meta.shape()[1],
            self.n_prefix,
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
        (self.rotated(&qkv, [&cos, &sin], 1.0), [cos, sin])
    }

    fn backward(&self, [cos, sin]: Self::Saved, grad: CubeTensor, _: [bool; 3]) -> [Option<CubeTensor>; 3] {
        [Some(self.rotated(&grad, [&cos, &sin], -1.0)), None, None]
    }
}

/// Turns one pair of channels in each unit.
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
    n_tokens: usize,
    n_prefix: usize,
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
        let at_x = row * x_stride + head * (2 * half) + channel;
        let at_y = row * y_stride + head * (2 * half) + channel;
        let token = row % n_tokens;
        if token >= n_prefix && head < 2 * n_heads {
            let cell = token - n_prefix;
            let c = cos[cell * cos_stride + channel];
            let s = sin[cell * sin_stride + channel] * sign;
            let first = f32::cast_from(x[at_x]);
            let second = f32::cast_from(x[at_x + half]);
            y[at_y] = F::cast_from(first * c - second * s);
            y[at_y + half] = F::cast_from(second * c + first * s);
        } else {
            y[at_y] = x[at_x];
            y[at_y + half] = x[at_x + half];
        }
    }
}
