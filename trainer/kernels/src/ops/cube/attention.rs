//! [`attention`](crate::ops::attention) with the device's own matrix products, on heads whose tokens are padded to a
//! multiple of eight, and one pass over the scores between the products, forwards and backwards.
//!
//! ```text
//! Q, K, V = split(qkv)              [B, N, 3·H·D_h] to [B, H, M, D_h]     M = N, up to a multiple of 8
//! P  = softmax(Q · Kᵀ / √D_h)       [B, H, M, M], zero in columns N.. ;   y = merge(P · V)   [B, N, H·D_h]
//! gV = Pᵀ · g     gP = g · Vᵀ       gS = P ∘ (gP - rowsum(gP ∘ P)) / √D_h
//! gQ = gS · K     gK = gSᵀ · Q
//! ```

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use super::heads::{Sizes, merge, split};
use super::product::{product, transposed};
use super::softmax::{softmax, softmax_gradient};
use super::{Rows, empty};
use crate::ops::bridge::Kernel;

/// The operation's kernels, forwards and backwards.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Attention {
    pub(in crate::ops) n_heads: usize,
}

/// The input, and the attention weights `[B, H, M, M]`.
type Saved = (CubeTensor, CubeTensor);

impl Attention {
    /// Returns the sizes, given rows of `n_parts` parts.
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
        let qkv = Rows::of(&qkv);
        let [q, k, v] = [0, 1, 2].map(|part| split(&qkv, part, sizes));
        let weights = softmax(product(q, transposed(k)), scale(sizes), sizes.n_tokens);
        let y = Rows::of(&empty(&qkv.tensor, [sizes.n_images, sizes.n_tokens, sizes.d()], qkv.tensor.dtype));
        merge(&product(weights.clone(), v), &y, 0, sizes);
        (y.tensor, (qkv.tensor, weights))
    }

    fn backward(&self, (qkv, weights): Saved, grad: CubeTensor, _: [bool; 1]) -> [Option<CubeTensor>; 1] {
        let sizes = self.sizes(&qkv, 3);
        let (qkv, grad) = (Rows::of(&qkv), Rows::of(&grad));
        let out =
            Rows::of(&empty(&qkv.tensor, [sizes.n_images, sizes.n_tokens, 3 * sizes.d()], qkv.tensor.dtype));
        let g = split(&grad, 0, sizes);
        merge(&product(transposed(weights.clone()), g.clone()), &out, 2, sizes);
        let of_weights = product(g, transposed(split(&qkv, 2, sizes)));
        let of_scores = softmax_gradient(&weights, of_weights, scale(sizes));
        merge(&product(of_scores.clone(), split(&qkv, 1, sizes)), &out, 0, sizes);
        merge(&product(transposed(of_scores), split(&qkv, 0, sizes)), &out, 1, sizes);
        [Some(out.tensor)]
    }
}

fn scale(sizes: Sizes) -> f32 {
    (sizes.d_head as f32).powf(-0.5)
}
