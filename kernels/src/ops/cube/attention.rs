//! [`attention`](crate::ops::attention) within each of the sequences that a stream of tokens
//! consists of: by Ocelli's kernels for NVIDIA GPUs, which take all sequences in one launch, else
//! with the device's matrix products, for sequences of one length at a time. For products, the
//! tokens of heads are padded to a multiple of eight; one pass over the scores is between them, in
//! the forward and in the backward pass.
//!
//! ```text
//! Q, K, V = split(qkv)              [B, N, 3·H·D_h] to [B, H, M, D_h]     M = ⌈N / 8⌉ · 8
//! P  = softmax(Q · Kᵀ / √D_h)       [B, H, M, M], zero in columns N..
//! y  = merge(P · V)                 [B, N, H·D_h]
//! gV = Pᵀ · g     gP = g · Vᵀ       gS = P ∘ (gP - rowsum(gP ∘ P)) / √D_h
//! gQ = gS · K     gK = gSᵀ · Q
//! ```

use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use super::heads::{Sizes, head_part, merge, merge_three, split};
#[cfg(feature = "cuda")]
use super::packed_attention;
use super::product::product;
use super::softmax::{softmax, softmax_gradient};
use super::{Rows, transposed};
use crate::ops::bridge::Kernel;
use crate::ops::lengths::Lengths;

/// Kernels of the forward and backward pass on packed sequences, `[T, 3·D]` to `[T, D]`.
#[derive(Debug, Clone)]
pub(in crate::ops) struct StreamAttention {
    pub(in crate::ops) n_heads: usize,
    /// Lengths of the sequences, one after another.
    pub(in crate::ops) lengths: Lengths,
}

/// What the backward pass on packed sequences needs.
#[derive(Debug, Clone)]
pub(in crate::ops) enum StreamSaved {
    /// All sequences at once.
    #[cfg(feature = "cuda")]
    Packed(packed_attention::Attended),
    /// Each run of sequences of one length.
    Runs(Vec<Saved>),
}

impl Kernel<CubeBackend, 1> for StreamAttention {
    type Saved = StreamSaved;

    fn forward(&self, [qkv]: [CubeTensor; 1]) -> (CubeTensor, StreamSaved) {
        #[cfg(feature = "cuda")]
        if let Some(attended) = packed_attention::forward(&qkv, self.n_heads, &self.lengths) {
            return (attended.y.clone(), StreamSaved::Packed(attended));
        }
        let (y, saved) = self.forward_by_runs(&qkv);
        (y, StreamSaved::Runs(saved))
    }

    fn backward(&self, saved: StreamSaved, grad: CubeTensor, _: [bool; 1]) -> [Option<CubeTensor>; 1] {
        let saved = match saved {
            #[cfg(feature = "cuda")]
            StreamSaved::Packed(attended) => {
                let gradient = packed_attention::backward(&attended, &grad, self.n_heads, &self.lengths);
                if gradient.is_some() {
                    return [gradient];
                }
                // The products compute the weights again.
                self.forward_by_runs(&attended.qkv.tensor).1
            }
            StreamSaved::Runs(saved) => saved,
        };
        [Some(self.backward_by_runs(saved, &grad))]
    }
}

impl StreamAttention {
    /// Returns the output, and what the backward pass of each run needs.
    fn forward_by_runs(&self, qkv: &CubeTensor) -> (CubeTensor, Vec<Saved>) {
        let kernel = Attention { n_heads: self.n_heads };
        let mut outputs = Vec::new();
        let mut saved = Vec::new();
        for run in self.split_runs(qkv) {
            let (y, kept) = kernel.forward([run]);
            outputs.push(y);
            saved.push(kept);
        }
        (join_runs(outputs), saved)
    }

    fn backward_by_runs(&self, saved: Vec<Saved>, grad: &CubeTensor) -> CubeTensor {
        let kernel = Attention { n_heads: self.n_heads };
        let mut gradients = Vec::with_capacity(saved.len());
        for (grad, saved) in self.split_runs(grad).into_iter().zip(saved) {
            let [gradient] = kernel.backward(saved, grad, [true]);
            gradients.extend(gradient);
        }
        join_runs(gradients)
    }

    /// Returns the sequences of each run, `[sequences, length, width]`, of rows of `[T, width]`.
    fn split_runs(&self, rows: &CubeTensor) -> Vec<CubeTensor> {
        let width = rows.meta.shape()[1];
        let mut runs = Vec::with_capacity(self.lengths.runs().len());
        let mut start = 0;
        for run in self.lengths.runs() {
            let end = start + run.n_tokens();
            let ranges = [(start..end).into(), (0..width).into()];
            let part = CubeBackend::float_slice(rows.clone(), &ranges);
            let shape = [run.n_sequences, run.length, width];
            runs.push(CubeBackend::float_reshape(part, shape.into()));
            start = end;
        }
        runs
    }
}

/// Returns the rows of all runs, `[T, width]`, given the sequences of each, `[.., width]`.
fn join_runs(runs: Vec<CubeTensor>) -> CubeTensor {
    let mut parts = Vec::with_capacity(runs.len());
    for run in runs {
        let shape = run.meta.shape();
        let n_rows = shape[0] * shape[1];
        let width = shape[2];
        parts.push(CubeBackend::float_reshape(run, [n_rows, width].into()));
    }
    if parts.len() == 1 { parts.remove(0) } else { CubeBackend::float_cat(parts, 0) }
}

/// Kernels of the forward and backward pass on sequences of one length.
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
