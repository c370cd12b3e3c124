//! Multi-head self-attention between the projections, over sequences that follow one another.
//!
//! ```text
//! Q, K, V = split(qkv)                per sequence and head [N, D_h]
//! P  = softmax(Q · Kᵀ / √D_h)         [N, N]
//! y  = P · V
//! gV = Pᵀ · g     gP = g · Vᵀ     gS = P ∘ (gP - rowsum(gP ∘ P)) / √D_h
//! gQ = gS · K     gK = gSᵀ · Q
//! ```
//!
//! `qkv` is the output of one linear layer, `[T, 3·H·D_h]` for the T tokens of all sequences, with
//! the order (q, k, v), head, channel in its last dimension, as in timm and DINO. The tokens of a
//! sequence attend to those of the same sequence only.
//!
//! The CPU kernel computes the weights P of a head as a whole if the sequence is short ([`whole`]),
//! and else by blocks that it does not keep ([`blocks`]). A sequence gives the same bits by itself
//! and between others.

mod blocks;
mod heads;
mod plain;
mod whole;

use std::marker::PhantomData;
use std::sync::Arc;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::bridge::{Kernel, run};
use super::cpu::{contiguous, dims, elements, flex_dtype, tensor};
#[cfg(feature = "cube")]
use super::cube;
use super::lengths::Lengths;
use super::number::Number;
use heads::Sizes;
pub use heads::keeps_weights;
pub use plain::class_attention;

/// Sequences that a thread takes at once, at most: threads that have short sequences take over
/// some of those that have long ones.
const MAX_AT_ONCE: usize = 4;

/// Returns the attention of `n_heads` heads over the sequences of `qkv` of `[T, 3·D]`, `[T, D]`.
///
/// # Panics
/// If there is no sequence, or `lengths` has another number of tokens than `qkv`.
pub fn attention(qkv: Tensor<2>, lengths: &Lengths, n_heads: usize) -> Tensor<2> {
    let [n_tokens, _] = qkv.dims();
    assert!(n_tokens > 0, "at least one sequence");
    assert_eq!(lengths.n_tokens(), n_tokens, "tokens of the sequences");
    #[cfg(feature = "cube")]
    if cube::is_cube(&qkv) {
        return run(cube::StreamAttention { n_heads, lengths: lengths.clone() }, [qkv.into()]);
    }
    match flex_dtype(&qkv) {
        Some(DType::F32) => run(Attention::<f32>::new(lengths, n_heads), [qkv.into()]),
        Some(DType::BF16) => run(Attention::<bf16>::new(lengths, n_heads), [qkv.into()]),
        _ => by_runs(qkv, lengths, |rows| plain::plain(rows, n_heads)),
    }
}

/// Returns the results of `attend` for the sequences of each run, one after another: from
/// `[S, N, 3·D]` to `[S, N, D]`, and in all from `[T, 3·D]` to `[T, D]`.
fn by_runs(qkv: Tensor<2>, lengths: &Lengths, attend: impl Fn(Tensor<3>) -> Tensor<3>) -> Tensor<2> {
    let [n_tokens, d3] = qkv.dims();
    if let [run] = lengths.runs() {
        return attend(qkv.reshape([run.n_sequences, run.length, d3])).reshape([n_tokens, d3 / 3]);
    }
    let mut results = Vec::with_capacity(lengths.runs().len());
    let mut start = 0;
    for run in lengths.runs() {
        let end = start + run.n_tokens();
        let rows = qkv.clone().slice([start..end, 0..d3]).reshape([run.n_sequences, run.length, d3]);
        results.push(attend(rows).reshape([run.n_tokens(), d3 / 3]));
        start = end;
    }
    Tensor::cat(results, 0)
}

/// Kernel for `qkv` with elements of type `T`; scores and softmax are f32.
#[derive(Debug, Clone)]
struct Attention<T> {
    lengths: Lengths,
    n_heads: usize,
    numbers: PhantomData<T>,
}

/// Values for the backward pass.
#[derive(Debug, Clone)]
struct Saved<T> {
    /// Queries, keys and values, `[T, 3·D]`.
    qkv: FlexTensor,
    /// Weights of the short sequences, `[H, N, N]` each.
    weights: Arc<Vec<T>>,
    /// Output, `[T, D]`, if there are long sequences.
    y: Option<FlexTensor>,
    /// Log-sum-exp of the scores of the long sequences, `[H, N]` each.
    log_sums: Arc<Vec<f32>>,
}

/// What a stream of sequences has in all.
#[derive(Debug, Clone, Copy, Default)]
struct Totals {
    n_weights: usize,
    n_log_sums: usize,
    /// Number of heads of long sequences.
    n_long_heads: usize,
}

/// A sequence in the forward pass.
struct Forward<'a, T> {
    sizes: Sizes,
    /// Queries, keys and values, `[N, 3·D]`.
    qkv: &'a [T],
    /// Output, `[N, D]`.
    y: &'a mut [T],
    /// Weights, `[H, N, N]`, if the sequence is short.
    weights: &'a mut [T],
    /// Log-sum-exp, `[H, N]`, if the sequence is long.
    log_sums: &'a mut [f32],
}

/// A sequence in the backward pass.
struct Backward<'a, T> {
    sizes: Sizes,
    /// Weights, `[H, N, N]`, if the sequence is short.
    weights: &'a [T],
    inputs: blocks::Inputs<'a, T>,
    /// Gradient of queries, keys and values, `[N, 3·D]`.
    out: &'a mut [T],
}

impl<T: Number> Attention<T> {
    fn new(lengths: &Lengths, n_heads: usize) -> Self {
        Self { lengths: lengths.clone(), n_heads, numbers: PhantomData }
    }

    /// Returns the sizes of a sequence whose outputs have width `d`.
    fn sizes(&self, n_tokens: usize, d: usize) -> Sizes {
        Sizes { n_tokens, n_heads: self.n_heads, d_head: d / self.n_heads }
    }

    fn totals(&self, d: usize) -> Totals {
        let mut totals = Totals::default();
        for run in self.lengths.runs() {
            let sizes = self.sizes(run.length, d);
            totals.n_weights += run.n_sequences * sizes.n_weights();
            totals.n_log_sums += run.n_sequences * sizes.n_log_sums();
            if !sizes.is_whole() {
                totals.n_long_heads += run.n_sequences * self.n_heads;
            }
        }
        totals
    }
}

impl<T: Number> Kernel<Flex, 1> for Attention<T> {
    type Saved = Saved<T>;

    fn forward(&self, [qkv]: [FlexTensor; 1]) -> (FlexTensor, Saved<T>) {
        let [n_tokens, d3]: [usize; 2] = dims(&qkv);
        let d = d3 / 3;
        let totals = self.totals(d);
        let qkv = contiguous(&qkv);
        let rows = elements::<T>(&qkv);
        let mut y = vec![T::default(); n_tokens * d];
        let mut weights = vec![T::default(); totals.n_weights];
        let mut log_sums = vec![0.0; totals.n_log_sums];
        let mut rest_y = &mut y[..];
        let mut rest_weights = &mut weights[..];
        let mut rest_log_sums = &mut log_sums[..];
        let mut sequences = Vec::with_capacity(self.lengths.n_sequences());
        for tokens in self.lengths.ranges() {
            let sizes = self.sizes(tokens.len(), d);
            sequences.push(Forward {
                sizes,
                qkv: &rows[tokens.start * d3..tokens.end * d3],
                y: split_off(&mut rest_y, tokens.len() * d),
                weights: split_off(&mut rest_weights, sizes.n_weights()),
                log_sums: split_off(&mut rest_log_sums, sizes.n_log_sums()),
            });
        }
        let sequences = sequences.into_par_iter().with_max_len(MAX_AT_ONCE);
        sequences.for_each_init(Vec::new, |scores, sequence| {
            let Forward { sizes, qkv, y, weights, log_sums } = sequence;
            if sizes.is_whole() {
                whole::attend(sizes, qkv, weights, y, scores);
            } else {
                blocks::attend(sizes, qkv, y, log_sums, totals.n_long_heads);
            }
        });
        let y = tensor(y, [n_tokens, d]);
        let kept_y = (totals.n_long_heads > 0).then(|| y.clone());
        (y, Saved { qkv, weights: Arc::new(weights), y: kept_y, log_sums: Arc::new(log_sums) })
    }

    fn backward(&self, saved: Saved<T>, grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let [n_tokens, d]: [usize; 2] = dims(&grad);
        let totals = self.totals(d);
        let grad = contiguous(&grad);
        let qkv = elements::<T>(&saved.qkv);
        let grads = elements::<T>(&grad);
        let y = saved.y.as_ref().map(elements::<T>);
        let mut out = vec![T::default(); n_tokens * 3 * d];
        let mut rest_out = &mut out[..];
        let mut rest_weights = &saved.weights[..];
        let mut rest_log_sums = &saved.log_sums[..];
        let mut sequences = Vec::with_capacity(self.lengths.n_sequences());
        for tokens in self.lengths.ranges() {
            let sizes = self.sizes(tokens.len(), d);
            let (weights, later_weights) = rest_weights.split_at(sizes.n_weights());
            let (log_sums, later_log_sums) = rest_log_sums.split_at(sizes.n_log_sums());
            rest_weights = later_weights;
            rest_log_sums = later_log_sums;
            let outputs = tokens.start * d..tokens.end * d;
            let y: &[T] = match y {
                Some(y) => &y[outputs.clone()],
                None => &[],
            };
            let qkv = &qkv[3 * outputs.start..3 * outputs.end];
            let inputs = blocks::Inputs { qkv, y, log_sums, grad: &grads[outputs] };
            let out = split_off(&mut rest_out, 3 * tokens.len() * d);
            sequences.push(Backward { sizes, weights, inputs, out });
        }
        let sequences = sequences.into_par_iter().with_max_len(MAX_AT_ONCE);
        sequences.for_each_init(Vec::new, |scratch, sequence| {
            let Backward { sizes, weights, inputs, out } = sequence;
            if sizes.is_whole() {
                whole::attend_backward(sizes, inputs.qkv, weights, inputs.grad, out, scratch);
            } else {
                blocks::attend_backward(sizes, inputs, out, totals.n_long_heads);
            }
        });
        [Some(tensor(out, [n_tokens, 3 * d]))]
    }
}

/// Removes the first `len` elements from `rest`, and returns them.
fn split_off<'a, T>(rest: &mut &'a mut [T], len: usize) -> &'a mut [T] {
    let (first, later) = std::mem::take(rest).split_at_mut(len);
    *rest = later;
    first
}

#[cfg(test)]
mod tests {
    use burn_tensor::Device;

    use super::*;
    use crate::ops::testing::{assert_close, assert_gradients_close, backward, devices, leaves, types};
    use crate::ops::{Run, cast};

    /// Short and long sequences, and long ones whose last block is shorter than the others.
    fn mixed_lengths() -> Lengths {
        let runs = [(2, 197), (3, 21), (1, 613), (4, 1), (2, 300), (1, 5), (1, 289)];
        Lengths::new(runs.map(|(n_sequences, length)| Run { n_sequences, length }))
    }

    /// Shapes cover numbers of tokens that are and are not multiples of eight, one token, rows
    /// longer than the lanes of a GPU's plane, and sequences of several blocks.
    #[test]
    fn matches_plain_forward_and_backward() {
        let streams = [
            (Lengths::equal(2, 21), 24),
            (Lengths::equal(3, 16), 48),
            (Lengths::equal(1, 1), 24),
            (Lengths::equal(1, 197), 96),
            (Lengths::equal(2, 300), 48),
            (Lengths::equal(1, 613), 96),
            (mixed_lengths(), 48),
        ];
        for device in devices() {
            for (dtype, tolerance) in types(&device, 5e-6) {
                for (lengths, d) in &streams {
                    check(&device, lengths, *d, dtype, tolerance);
                }
            }
        }
    }

    fn check(device: &Device, lengths: &Lengths, d: usize, dtype: DType, tolerance: f32) {
        let qkv = leaves(device, &[[lengths.n_tokens(), 3 * d]], 1).remove(0);
        let y = attention(cast(qkv.clone(), dtype), lengths, 3);
        let expected = by_runs(cast(qkv.clone(), dtype), lengths, |rows| plain::plain(rows, 3));
        assert_eq!(y.dtype(), dtype);
        assert_close("forward", y.clone().inner(), expected.clone().inner(), tolerance / 2.5);
        assert_gradients_close("backward", &qkv, &backward(y), &backward(expected), tolerance);
    }

    #[test]
    fn large_scores_do_not_overflow() {
        for device in devices() {
            for length in [5, 613] {
                let qkv = leaves(&device, &[[length, 3 * 8]], 2).remove(0);
                let y = attention(qkv.clone() * 300.0, &Lengths::equal(1, length), 1);
                assert!(y.clone().inner().is_finite().all().into_scalar::<bool>());
                let gradient = qkv.grad(&backward(y)).expect("a leaf");
                assert!(gradient.is_finite().all().into_scalar::<bool>());
            }
        }
    }

    /// Output and gradient of a stream.
    #[derive(PartialEq)]
    struct Pass<T> {
        y: Vec<T>,
        gradient: Vec<T>,
    }

    /// Runs the CPU kernel of three heads forwards and backwards. `qkv` is `[T, 3·D]`, `grad` the
    /// gradient of the output, `[T, D]`.
    fn pass<T: Number>(qkv: &[T], grad: &[T], lengths: &Lengths) -> Pass<T> {
        let n_tokens = lengths.n_tokens();
        let d = grad.len() / n_tokens;
        let kernel = Attention::<T>::new(lengths, 3);
        let (y, saved) = Kernel::<Flex, 1>::forward(&kernel, [tensor(qkv.to_vec(), [n_tokens, 3 * d])]);
        let grad = tensor(grad.to_vec(), [n_tokens, d]);
        let [gradient] = Kernel::<Flex, 1>::backward(&kernel, saved, grad, [true]);
        let gradient = gradient.expect("it is wanted");
        Pass { y: elements::<T>(&y).to_vec(), gradient: elements::<T>(&gradient).to_vec() }
    }

    fn numbers<T: Number>(n: usize, frequency: f32) -> Vec<T> {
        (0..n).map(|i| T::nearest(2.0 * (i as f32 * frequency).sin())).collect()
    }

    #[test]
    fn sequences_between_others_have_the_bits_of_sequences_alone() {
        check_sequences::<f32>();
        check_sequences::<bf16>();
    }

    fn check_sequences<T: Number + PartialEq>() {
        let lengths = mixed_lengths();
        let d = 24;
        let qkv = numbers::<T>(lengths.n_tokens() * 3 * d, 0.7);
        let grad = numbers::<T>(lengths.n_tokens() * d, 0.3);
        let together = pass(&qkv, &grad, &lengths);
        for tokens in lengths.ranges() {
            let outputs = tokens.start * d..tokens.end * d;
            let inputs = 3 * outputs.start..3 * outputs.end;
            let length = Lengths::equal(1, tokens.len());
            let alone = pass(&qkv[inputs.clone()], &grad[outputs.clone()], &length);
            assert!(alone.y == together.y[outputs], "output of {tokens:?}");
            assert!(alone.gradient == together.gradient[inputs], "gradient of {tokens:?}");
        }
    }

    /// With more and with fewer heads of long sequences than threads.
    #[test]
    fn bits_do_not_depend_on_threads() {
        for lengths in [mixed_lengths(), Lengths::equal(1, 613)] {
            check_threads::<f32>(&lengths);
            check_threads::<bf16>(&lengths);
        }
    }

    fn check_threads<T: Number + PartialEq>(lengths: &Lengths) {
        let d = 48;
        let qkv = numbers::<T>(lengths.n_tokens() * 3 * d, 0.7);
        let grad = numbers::<T>(lengths.n_tokens() * d, 0.3);
        let mut passes = Vec::new();
        for n_threads in [1, 3, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().expect("a pool");
            passes.push(pool.install(|| pass(&qkv, &grad, lengths)));
        }
        assert!(passes[0] == passes[1]);
        assert!(passes[0] == passes[2]);
    }
}
