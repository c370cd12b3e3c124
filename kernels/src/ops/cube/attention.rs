//! [`attention`](crate::ops::attention) with the device's matrix products, on heads whose tokens
//! are padded to a multiple of eight, and one pass over the scores between the products, in the
//! forward and in the backward pass.
//!
//! ```text
//! Q, K, V = split(qkv)              [B, N, 3·H·D_h] to [B, H, M, D_h]     M = ⌈N / 8⌉ · 8
//! P  = softmax(Q · Kᵀ / √D_h)       [B, H, M, M], zero in columns N..
//! y  = merge(P · V)                 [B, N, H·D_h]
//! gV = Pᵀ · g     gP = g · Vᵀ       gS = P ∘ (gP - rowsum(gP ∘ P)) / √D_h
//! gQ = gS · K     gK = gSᵀ · Q
//! ```

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use super::heads::{Sizes, head_part, merge, merge_three, split};
use super::product::product;
use super::softmax::{softmax, softmax_gradient};
use super::{Rows, transposed};
use crate::ops::bridge::Kernel;

/// Kernels of the forward and backward pass.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Attention {
    pub(in crate::ops) n_heads: usize,
}

/// Queries, keys and values `[3, B, H, M, D_h]`, and the attention weights `[B, H, M, M]`.
type Saved = (CubeTensor, CubeTensor);

impl Attention {
    /// Returns the sizes of `rows` of `[B, N, n_parts·H·D_h]`.
    fn sizes(&self, rows: &CubeTensor, n_parts: usize) -> Sizes {
        let shape = rows.meta.shape();
        let d_head = shape[2] / n_parts / self.n_heads;
        Sizes { n_images: shape[0], n_tokens: shape[1], n_heads: self.n_heads, d_head }
    }
}

impl Kernel<CubeBackend, 1> for Attention {
    type Saved = Saved;

    fn forward(&self, [qkv]: [CubeTensor; 1]) -> (CubeTensor, Saved) {
        let sizes = self.sizes(&qkv, 3);
        let qkv = split(&Rows::new(&qkv), 3, sizes);
        let [q, k, v] = [0, 1, 2].map(|part| head_part(&qkv, part));
        let weights = softmax(product(q, transposed(k)), scale(sizes), sizes.n_tokens);
        let y = merge(&product(weights.clone(), v), sizes);
        (y, (qkv, weights))
    }

    fn backward(&self, (qkv, weights): Saved, grad: CubeTensor, _: [bool; 1]) -> [Option<CubeTensor>; 1] {
        let sizes = self.sizes(&grad, 1);
        let [q, k, v] = [0, 1, 2].map(|part| head_part(&qkv, part));
        let g = head_part(&split(&Rows::new(&grad), 1, sizes), 0);
        let gv = product(transposed(weights.clone()), g.clone());
        let weight_grad = product(g, transposed(v));
        let score_grad = softmax_gradient(&weights, weight_grad, scale(sizes));
        let gq = product(score_grad.clone(), k);
        let gk = product(transposed(score_grad), q);
        [Some(merge_three(&[gq, gk, gv], sizes))]
    }
}

fn scale(sizes: Sizes) -> f32 {
    (sizes.d_head as f32).powf(-0.5)
}
