//! Attention composed of Burn's own operations.

use burn_tensor::{Tensor, activation};

use crate::ops::in_f32;
use crate::ops::lengths::Lengths;

/// Computes scores and softmax in f32, and the product with V in the type of `qkv`: from
/// `[S, N, 3·D]` to `[S, N, D]`.
pub(super) fn plain(qkv: Tensor<3>, n_heads: usize) -> Tensor<3> {
    let [n_sequences, length, d3] = qkv.dims();
    let all_weights = weights(qkv.clone(), qkv.clone(), n_heads).cast(qkv.dtype());
    all_weights.matmul(part(qkv, n_heads, 2)).swap_dims(1, 2).reshape([n_sequences, length, d3 / 3])
}

/// Returns the weights of the first token of each sequence on all tokens of the sequence, in f32:
/// `[S, H, N]` for S sequences of N tokens in `qkv` of `[S·N, 3·D]`.
///
/// # Panics
/// If the sequences differ in length.
pub fn class_attention(qkv: Tensor<2>, lengths: &Lengths, n_heads: usize) -> Tensor<3> {
    let [run] = lengths.runs() else { panic!("sequences of one length, not of {:?}", lengths.runs()) };
    let [_, d3] = qkv.dims();
    let qkv = qkv.reshape([run.n_sequences, run.length, d3]);
    let first = qkv.clone().slice([0..run.n_sequences, 0..1, 0..d3]);
    weights(first, qkv, n_heads).reshape([run.n_sequences, n_heads, run.length])
}

/// Returns the weights of the tokens in `queries` of `[S, M, 3·D]` on those in `keys` of
/// `[S, N, 3·D]`, in f32: `[S, H, M, N]`.
fn weights(queries: Tensor<3>, keys: Tensor<3>, n_heads: usize) -> Tensor<4> {
    let [_, _, d3] = queries.dims();
    let q = in_f32(part(queries, n_heads, 0));
    let k = in_f32(part(keys, n_heads, 1));
    let scale = ((d3 / 3 / n_heads) as f64).powf(-0.5);
    activation::softmax(q.matmul(k.swap_dims(2, 3)) * scale, 3)
}

/// Returns Q, K or V (`index` 0, 1 or 2) of `qkv` of `[S, N, 3·D]`: `[S, H, N, D_h]`.
fn part(qkv: Tensor<3>, n_heads: usize, index: usize) -> Tensor<4> {
    let [n_sequences, length, d3] = qkv.dims();
    let parts = qkv.reshape([n_sequences, length, 3, n_heads, d3 / 3 / n_heads]).permute([2, 0, 3, 1, 4]);
    parts.narrow(0, index, 1).squeeze_dim(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::cast;
    use crate::ops::testing::{assert_close, devices, leaves, types};

    #[test]
    fn class_attention_is_the_first_row_of_the_weights() {
        for device in devices() {
            for (dtype, _) in types(&device, 0.0) {
                for [n_sequences, length] in [[3, 5], [1, 1], [2, 300]] {
                    let qkv = leaves(&device, &[[n_sequences * length, 3 * 24]], 5).remove(0).inner();
                    let qkv = cast(qkv, dtype);
                    let lengths = Lengths::equal(n_sequences, length);
                    let first = class_attention(qkv.clone(), &lengths, 3);
                    assert_eq!(first.dtype(), burn_tensor::DType::F32);
                    let sequences = qkv.reshape([n_sequences, length, 3 * 24]);
                    let all = weights(sequences.clone(), sequences, 3);
                    let expected = all.slice([0..n_sequences, 0..3, 0..1, 0..length]);
                    let expected = expected.reshape([n_sequences, 3, length]);
                    assert_close("class attention", first, expected, 1e-5);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "sequences of one length")]
    fn class_attention_needs_sequences_of_one_length() {
        let qkv = Tensor::zeros([7, 24], &burn_tensor::Device::flex());
        let runs = [3, 4].map(|length| crate::ops::Run { n_sequences: 1, length });
        class_attention(qkv, &Lengths::new(runs), 1);
    }
}
