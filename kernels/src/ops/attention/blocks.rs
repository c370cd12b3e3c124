//! Attention of long sequences (Dao et al. 2022): scores are computed by blocks of queries and of
//! keys, and what is kept for the backward pass is the log-sum-exp L of the scores of each query.
//!
//! ```text
//! for each block i of queries:        m = -∞    l = 0    a = 0
//!     for each block j of keys:
//!         S  = Q_i · K_jᵀ / √D_h
//!         m' = max(m, rowmax(S))      P = exp(S - m')        f = exp(m - m')
//!         l  = f · l + rowsum(P)      a = f · a + P · V_j    m = m'
//!     y_i = a / l                     L_i = m + log l
//!
//! d = rowsum(g ∘ y)
//! for each block j of keys, and in it for each block i of queries:
//!     P   = exp(Q_i · K_jᵀ / √D_h - L_i)
//!     gS  = P ∘ (g_i · V_jᵀ - d_i) / √D_h
//!     gV_j += Pᵀ · g_i      gQ_i += gS · K_j      gK_j += gSᵀ · Q_i
//! ```
//!
//! All blocks of a head are computed one after another by one thread, so that results do not depend
//! on the number of threads. Sums over blocks are f32; P and gS are rounded to the type of `qkv`
//! before they are multiplied.

use std::ops::Range;

use burn_tensor::DType;
use multiversion::multiversion;
use rayon::prelude::*;

use super::heads::{Rows, Sizes, copy_rows, skip_rows, transpose};
use super::whole::fold_lanes;
use crate::ops::cpu_product::{Start, product_into};
use crate::ops::gemm::Mat;
use crate::ops::math::exp;
use crate::ops::number::{Number, convert};
use crate::ops::threads::run_task;

/// Tokens of a block, at most: two blocks of scores, 288 KiB, fit the L2 cache beside what the
/// products read and pack. With shorter blocks, packing would take more of the time.
const BLOCK: usize = 192;

/// Multiple of tokens at which blocks start: the lanes of a vector.
const UNIT: usize = 16;

/// Buffers of a thread in the forward pass.
#[derive(Default)]
struct Scratch<T> {
    /// Queries of a block, `[m, D_h]`.
    queries: Vec<T>,
    /// Transposed keys, `[D_h, N]`.
    keys: Vec<T>,
    /// Values, `[N, D_h]`.
    values: Vec<T>,
    /// Scores of a block and then its P, `[m, n]`.
    scores: Vec<f32>,
    /// P, rounded.
    rounded: Vec<T>,
    /// Sums a of a block of queries, `[m, D_h]`.
    sums: Vec<f32>,
    running: Running,
}

/// State of a block of queries, by query.
#[derive(Default)]
struct Running {
    /// Largest scores so far, m, not yet divided by √D_h.
    maxima: Vec<f32>,
    /// Sums of P so far, l.
    totals: Vec<f32>,
    /// Factors f of the previous sums.
    factors: Vec<f32>,
}

impl Running {
    /// Starts a block of `m` queries.
    fn start(&mut self, m: usize) {
        self.maxima.clear();
        self.maxima.resize(m, f32::NEG_INFINITY);
        self.totals.clear();
        self.totals.resize(m, 0.0);
        self.factors.resize(m, 0.0);
    }
}

/// Computes the attention of a sequence: from `[N, 3·D]` to output `[N, D]` and log-sum-exp
/// `[H, N]`. Its heads are some of `n_tasks` tasks that run in parallel.
pub(super) fn attend<T: Number>(sizes: Sizes, qkv: &[T], y: &mut [T], log_sums: &mut [f32], n_tasks: usize) {
    let y = Rows::new(y, sizes.d());
    let heads = log_sums.par_chunks_exact_mut(sizes.n_tokens).enumerate();
    heads.for_each_init(Scratch::<T>::default, |scratch, (head, log_sums)| {
        run_task(n_tasks, || attend_head(sizes, qkv, head, &y, log_sums, scratch));
    });
}

fn attend_head<T: Number>(
    sizes: Sizes,
    qkv: &[T],
    head: usize,
    y: &Rows<'_, T>,
    log_sums: &mut [f32],
    scratch: &mut Scratch<T>,
) {
    let n_tokens = sizes.n_tokens;
    let d_head = sizes.d_head;
    let Scratch { queries, keys, values, scores, rounded, sums, running } = scratch;
    transpose(sizes.head(qkv, 1, head), n_tokens, d_head, keys);
    copy_rows(sizes.head(qkv, 2, head), n_tokens, d_head, values);
    let k = Mat::rows(&keys[..], n_tokens).t();
    let v = Mat::rows(&values[..], d_head);
    scores.resize(BLOCK * BLOCK, 0.0);
    for rows in blocks(n_tokens) {
        let m = rows.len();
        copy_rows(skip_rows(sizes.head(qkv, 0, head), rows.start), m, d_head, queries);
        let q = Mat::rows(&queries[..], d_head);
        sums.resize(m * d_head, 0.0);
        running.start(m);
        for columns in blocks(n_tokens) {
            let n = columns.len();
            let scores = &mut scores[..m * n];
            let k = skip_rows(k, columns.start);
            let v = skip_rows(v, columns.start);
            product_into([m, d_head, n], 1.0, q, k.t(), Start::Zero, scores, n);
            exp_scores(scores, n, sizes.scale(), running);
            if columns.start > 0 {
                scale_rows(sums, d_head, &running.factors);
            }
            let p = Mat::rows(as_numbers(scores, rounded), n);
            product_into([m, n, d_head], 1.0, p, v, sum_start(columns.start), sums, d_head);
        }
        for (factor, total) in running.factors.iter_mut().zip(&running.totals) {
            *factor = 1.0 / total;
        }
        scale_rows(sums, d_head, &running.factors);
        y.write(rows.start, head * d_head, sums, d_head);
        write_log_sums(running, sizes.scale(), &mut log_sums[rows]);
    }
}

/// What the backward pass of a sequence reads.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a, T> {
    /// Queries, keys and values, `[N, 3·D]`.
    pub(super) qkv: &'a [T],
    /// Output, `[N, D]`.
    pub(super) y: &'a [T],
    /// Log-sum-exp, `[H, N]`.
    pub(super) log_sums: &'a [f32],
    /// Gradient of the output, `[N, D]`.
    pub(super) grad: &'a [T],
}

/// Buffers of a thread in the backward pass.
#[derive(Default)]
struct BackwardScratch<T> {
    /// Queries, `[N, D_h]`.
    queries: Vec<T>,
    /// Keys of a block, `[n, D_h]`.
    keys: Vec<T>,
    /// Transposed keys and values of a block, `[D_h, n]`.
    transposed_keys: Vec<T>,
    transposed_values: Vec<T>,
    /// Gradient of the head's output, `[N, D_h]`.
    grads: Vec<T>,
    /// Sums d of each query.
    dots: Vec<f32>,
    /// Scores of a block and then its P, `[m, n]`.
    scores: Vec<f32>,
    /// Gradient of a block of P and then of its scores, `[m, n]`.
    score_grads: Vec<f32>,
    /// P or gS, rounded.
    rounded: Vec<T>,
    /// Gradient of the queries, `[N, D_h]`.
    gq: Vec<f32>,
    /// Gradients of the keys and values of a block, `[n, D_h]`.
    gk: Vec<f32>,
    gv: Vec<f32>,
}

/// Computes the gradient of `qkv` of a sequence, `[N, 3·D]`. Its heads are some of `n_tasks` tasks
/// that run in parallel.
pub(super) fn attend_backward<T: Number>(sizes: Sizes, inputs: Inputs<'_, T>, out: &mut [T], n_tasks: usize) {
    let out = Rows::new(out, 3 * sizes.d());
    let heads = (0..sizes.n_heads).into_par_iter();
    heads.for_each_init(BackwardScratch::<T>::default, |scratch, head| {
        run_task(n_tasks, || head_backward(sizes, inputs, head, &out, scratch));
    });
}

fn head_backward<T: Number>(
    sizes: Sizes,
    inputs: Inputs<'_, T>,
    head: usize,
    out: &Rows<'_, T>,
    scratch: &mut BackwardScratch<T>,
) {
    let n_tokens = sizes.n_tokens;
    let d_head = sizes.d_head;
    let column = head * d_head;
    let y = Mat::rows(&inputs.y[column..], sizes.d());
    let g = Mat::rows(&inputs.grad[column..], sizes.d());
    let log_sums = &inputs.log_sums[head * n_tokens..][..n_tokens];
    let BackwardScratch {
        queries,
        keys,
        transposed_keys,
        transposed_values,
        grads,
        dots,
        scores,
        score_grads,
        rounded,
        gq,
        gk,
        gv,
    } = scratch;
    copy_rows(sizes.head(inputs.qkv, 0, head), n_tokens, d_head, queries);
    copy_rows(g, n_tokens, d_head, grads);
    dots.resize(n_tokens, 0.0);
    row_dots(y, g, d_head, dots);
    scores.resize(BLOCK * BLOCK, 0.0);
    score_grads.resize(BLOCK * BLOCK, 0.0);
    gq.resize(n_tokens * d_head, 0.0);
    gk.resize(BLOCK * d_head, 0.0);
    gv.resize(BLOCK * d_head, 0.0);
    for columns in blocks(n_tokens) {
        let n = columns.len();
        let block_keys = skip_rows(sizes.head(inputs.qkv, 1, head), columns.start);
        let block_values = skip_rows(sizes.head(inputs.qkv, 2, head), columns.start);
        copy_rows(block_keys, n, d_head, keys);
        transpose(block_keys, n, d_head, transposed_keys);
        transpose(block_values, n, d_head, transposed_values);
        let k = Mat::rows(&keys[..], d_head);
        let k_t = Mat::rows(&transposed_keys[..], n);
        let v_t = Mat::rows(&transposed_values[..], n);
        for rows in blocks(n_tokens) {
            let m = rows.len();
            let scores = &mut scores[..m * n];
            let score_grads = &mut score_grads[..m * n];
            let q = Mat::rows(&queries[rows.start * d_head..], d_head);
            let g = Mat::rows(&grads[rows.start * d_head..], d_head);
            product_into([m, d_head, n], 1.0, q, k_t, Start::Zero, scores, n);
            weights_of_scores(scores, n, sizes.scale(), &log_sums[rows.clone()]);
            let p = Mat::rows(as_numbers(scores, rounded), n);
            product_into([n, m, d_head], 1.0, p.t(), g, sum_start(rows.start), gv, d_head);
            product_into([m, d_head, n], 1.0, g, v_t, Start::Zero, score_grads, n);
            score_gradient(scores, score_grads, n, sizes.scale(), &dots[rows.clone()]);
            let gs = Mat::rows(as_numbers(score_grads, rounded), n);
            let gq = &mut gq[rows.start * d_head..];
            product_into([m, n, d_head], 1.0, gs, k, sum_start(columns.start), gq, d_head);
            product_into([n, m, d_head], 1.0, gs.t(), q, sum_start(rows.start), gk, d_head);
        }
        out.write(columns.start, sizes.d() + column, &gk[..n * d_head], d_head);
        out.write(columns.start, 2 * sizes.d() + column, &gv[..n * d_head], d_head);
    }
    out.write(0, column, gq, d_head);
}

/// Returns the blocks of `n_tokens` tokens, of nearly the same length.
fn blocks(n_tokens: usize) -> impl Iterator<Item = Range<usize>> {
    let n_blocks = n_tokens.div_ceil(BLOCK);
    let n_units = n_tokens.div_ceil(UNIT);
    (0..n_blocks).map(move |block| {
        let start = UNIT * (block * n_units / n_blocks);
        let end = UNIT * ((block + 1) * n_units / n_blocks);
        start..end.min(n_tokens)
    })
}

/// Returns what the sum over blocks that have the first token `first` is added to.
fn sum_start(first: usize) -> Start<'static> {
    if first == 0 { Start::Zero } else { Start::Output }
}

/// Returns `values` in type `T`: as they are if it is f32, else rounded, in `rounded`.
fn as_numbers<'a, T: Number>(values: &'a [f32], rounded: &'a mut Vec<T>) -> &'a [T] {
    match T::DTYPE {
        DType::F32 => bytemuck::cast_slice(values),
        _ => {
            rounded.resize(values.len(), T::default());
            convert(values, rounded);
            &rounded[..]
        }
    }
}

/// Replaces scores, rows of `n`, by their P, and adds them to the state of the queries.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn exp_scores(scores: &mut [f32], n: usize, scale: f32, running: &mut Running) {
    let Running { maxima, totals, factors } = running;
    for ((row, max), factor) in scores.chunks_exact_mut(n).zip(maxima.iter_mut()).zip(factors.iter_mut()) {
        let raised = fold_lanes(row, *max, |_, v| v, f32::max);
        *factor = (*max - raised) * scale;
        *max = raised;
        for value in row.iter_mut() {
            *value = (*value - raised) * scale;
        }
    }
    // Over all rows at once: the numbers after the last full vector of a row would be computed one
    // by one.
    for value in scores.iter_mut() {
        *value = exp(*value);
    }
    for factor in factors.iter_mut() {
        *factor = exp(*factor);
    }
    for ((row, total), factor) in scores.chunks_exact(n).zip(totals.iter_mut()).zip(factors.iter()) {
        *total = *total * *factor + fold_lanes(row, 0.0, |_, v| v, |a, b| a + b);
    }
}

/// Replaces scores, rows of `n`, by their P.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn weights_of_scores(scores: &mut [f32], n: usize, scale: f32, log_sums: &[f32]) {
    for (row, log_sum) in scores.chunks_exact_mut(n).zip(log_sums) {
        for value in row.iter_mut() {
            *value = *value * scale - log_sum;
        }
    }
    for value in scores.iter_mut() {
        *value = exp(*value);
    }
}

/// Replaces the gradient of P, rows of `n`, by that of the scores.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn score_gradient(weights: &[f32], grads: &mut [f32], n: usize, scale: f32, dots: &[f32]) {
    for ((weights, grads), dot) in weights.chunks_exact(n).zip(grads.chunks_exact_mut(n)).zip(dots) {
        for (grad, weight) in grads.iter_mut().zip(weights) {
            *grad = weight * (*grad - dot) * scale;
        }
    }
}

/// Multiplies each row of `d` numbers by its factor.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn scale_rows(rows: &mut [f32], d: usize, factors: &[f32]) {
    for (row, factor) in rows.chunks_exact_mut(d).zip(factors) {
        for value in row.iter_mut() {
            *value *= factor;
        }
    }
}

/// Sets `dots` to the products of the rows of `a` with those of `b`, `[N, d]` each.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn row_dots<T: Number>(a: Mat<'_, T>, b: Mat<'_, T>, d: usize, dots: &mut [f32]) {
    for (row, dot) in dots.iter_mut().enumerate() {
        let a = &a.data[row * a.row_stride..][..d];
        let b = &b.data[row * b.row_stride..][..d];
        let mut sum = 0.0;
        for (a, b) in a.iter().zip(b) {
            sum += a.wide() * b.wide();
        }
        *dot = sum;
    }
}

/// Writes the log-sum-exp of a block of queries.
fn write_log_sums(running: &Running, scale: f32, log_sums: &mut [f32]) {
    for ((log_sum, max), total) in log_sums.iter_mut().zip(&running.maxima).zip(&running.totals) {
        *log_sum = max * scale + total.ln();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_follow_one_another_and_are_of_nearly_the_same_length() {
        for n_tokens in 1..4500 {
            let mut end = 0;
            let mut lengths = Vec::new();
            for block in blocks(n_tokens) {
                assert_eq!(block.start, end);
                assert!(block.start.is_multiple_of(UNIT));
                lengths.push(block.len());
                end = block.end;
            }
            assert_eq!(end, n_tokens);
            let shortest = lengths.iter().min().copied().expect("a block");
            let longest = lengths.iter().max().copied().expect("a block");
            assert!(longest <= BLOCK && shortest + 2 * UNIT > longest, "{n_tokens}: {lengths:?}");
        }
    }
}
