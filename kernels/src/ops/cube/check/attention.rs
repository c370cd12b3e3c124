//! Checks of attention of packed sequences, on the data that it is computed from.
//!
//! Rows of a few heads are computed again by plain loops. Of the gradient, whole heads are compared
//! by its product with random directions r, one for each of Q, K and V, which is the derivative of
//! Σ g ∘ y in that direction:
//!
//! ```text
//! Σ gQ ∘ r = Σ_ij C_ij (r_i · k_j)     C = P ∘ (g · Vᵀ - δ) / √D     δ = rowsum(g ∘ y)
//! Σ gK ∘ r = Σ_ij C_ij (q_i · r_j)     Σ gV ∘ r = Σ_ij P_ij (g_i · r_j)
//! ```
//!
//! y is the output of the forward pass as it was rounded: where values are similar, g · Vᵀ - δ is
//! smaller than the error of that rounding. r is a row of ±1 times a column of ±1.
//!
//! Results are filled with NaN before they are computed, and none may be left; guard words before
//! and after them must remain unchanged; and a second run must be bit-identical.

use std::ops::Range;

use burn_backend::ops::IntTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, TensorData};
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::{Errors, Guarded, RunError, allocate_words, random_signs, read, to_device, weighted_sums};
use crate::ops::cube::{Rows, elem, one_unit_each};
use crate::product_kernels::Finding;

/// Number of heads of single sequences that are compared.
const N_SAMPLES: usize = 16;

/// Numbers per unit of [`attend`].
const N_ROW_NUMBERS: usize = 5;

/// Numbers per unit of [`differentiate`]: four for each of Q, K and V.
const N_SUMS: usize = 12;

/// Share of a result, or of the norm of results that are added, that is attributed to rounding them
/// to bf16: at least five times the largest error of one.
const RESULT_SHARE: f32 = 2e-2;

/// Share of the root of the sum of squares of all terms of a sum, whose roundings are independent:
/// nine times the standard deviation of the rounding of a bf16.
const TERM_SHARE: f32 = 2e-2;

/// Largest error of a logarithm, whose magnitude is that of scores, and share of it.
const LOG_ERROR: f32 = 1e-3;
const LOG_SHARE: f32 = 1e-4;

/// Attention that is checked.
pub(in crate::ops::cube) struct Subject<'a> {
    /// Queries, keys and values, `[T, 3·H·D]`.
    pub(in crate::ops::cube) qkv: &'a Rows,
    /// Rows of each sequence, none of which is empty.
    pub(in crate::ops::cube) sequences: &'a [Range<usize>],
    /// Number of heads.
    pub(in crate::ops::cube) n_heads: usize,
    /// Selects the sequences, heads and rows that are compared.
    pub(in crate::ops::cube) seed: u64,
}

/// Memory that the forward pass is written to.
pub(in crate::ops::cube) struct Outputs {
    /// The output, `[T, H·D]`, contiguous.
    pub(in crate::ops::cube) y: CubeTensor,
    /// Logarithms to the base of 2 of the sums of exponentials of scores, `[H, T]` of f32.
    pub(in crate::ops::cube) logs: CubeTensor,
}

/// A row of a head of a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Sample {
    sequence: usize,
    rows: Range<usize>,
    head: usize,
    /// Row within the sequence.
    row: usize,
}

/// Checks `run`, which computes the forward pass.
pub(in crate::ops::cube) fn check_forward(
    subject: &Subject<'_>,
    run: &dyn Fn(&Outputs) -> Result<(), RunError>,
) -> Finding {
    if !matches!(are_finite(&subject.qkv.tensor), Ok(true)) {
        return Finding::Inconclusive;
    }
    let like = &subject.qkv.tensor;
    let n_tokens = subject.qkv.n_rows;
    let y = [(); 2].map(|()| Guarded::new(like, &[n_tokens, subject.width()], like.dtype));
    let logs = [(); 2].map(|()| Guarded::new(like, &[subject.n_heads, n_tokens], DType::F32));
    for (y, logs) in y.iter().zip(&logs) {
        if let Err(error) = run(&Outputs { y: y.out.clone(), logs: logs.out.clone() }) {
            return error.into_finding();
        }
    }
    for [first, second] in [&y, &logs] {
        if let Some(finding) = find_fault(first, second) {
            return finding;
        }
    }
    let outputs = Outputs { y: y[0].out.clone(), logs: logs[0].out.clone() };
    compare_rows(subject, &outputs).unwrap_or(Finding::Inconclusive)
}

/// Checks `run`, which computes the gradient of `qkv`, `[T, 3·H·D]`, given the output and its
/// gradient, `[T, H·D]`, the former contiguous.
pub(in crate::ops::cube) fn check_backward(
    subject: &Subject<'_>,
    y: &CubeTensor,
    grad: &Rows,
    run: &dyn Fn(&CubeTensor) -> Result<(), RunError>,
) -> Finding {
    for tensor in [&subject.qkv.tensor, &grad.tensor] {
        if !matches!(are_finite(tensor), Ok(true)) {
            return Finding::Inconclusive;
        }
    }
    let like = &subject.qkv.tensor;
    let shape = [subject.qkv.n_rows, 3 * subject.width()];
    let [first, second] = [(); 2].map(|()| Guarded::new(like, &shape, like.dtype));
    for result in [&first, &second] {
        if let Err(error) = run(&result.out) {
            return error.into_finding();
        }
    }
    if let Some(finding) = find_fault(&first, &second) {
        return finding;
    }
    compare_directions(subject, y, grad, &first.out).unwrap_or(Finding::Inconclusive)
}

impl Subject<'_> {
    /// Returns H·D.
    fn width(&self) -> usize {
        self.qkv.d / 3
    }

    fn d_head(&self) -> usize {
        self.width() / self.n_heads
    }

    fn scale(&self) -> f32 {
        (self.d_head() as f32).powf(-0.5)
    }

    /// Returns the longest and the shortest sequence, and others in equal distances, with a head
    /// and a row of each.
    fn samples(&self) -> Vec<Sample> {
        let n = self.sequences.len();
        let mut longest = 0;
        let mut shortest = 0;
        for (index, rows) in self.sequences.iter().enumerate() {
            if rows.len() > self.sequences[longest].len() {
                longest = index;
            }
            if rows.len() < self.sequences[shortest].len() {
                shortest = index;
            }
        }
        let mut samples = Vec::with_capacity(N_SAMPLES);
        for i in 0..N_SAMPLES {
            let number = self.seed.wrapping_mul(N_SAMPLES as u64).wrapping_add(i as u64);
            let sequence = match i {
                0 => longest,
                1 => shortest,
                _ => (n * i / N_SAMPLES + below(number, 1, n.div_ceil(N_SAMPLES))).min(n - 1),
            };
            let rows = self.sequences[sequence].clone();
            // Tiles end with the last row.
            let row = if i.is_multiple_of(4) { rows.len() - 1 } else { below(number, 2, rows.len()) };
            samples.push(Sample { sequence, rows, head: below(number, 3, self.n_heads), row });
        }
        samples
    }

    /// Copies samples to the device: start, length, head and row of each.
    fn upload(&self, samples: &[Sample]) -> CubeTensor {
        let mut words = Vec::with_capacity(4 * samples.len());
        for Sample { rows, head, row, .. } in samples {
            words.extend([rows.start, rows.len(), *head, *row].map(|n| n as i32));
        }
        let n = words.len();
        CubeBackend::int_from_data(TensorData::new(words, [n]), &self.qkv.tensor.device)
    }
}

/// Returns a pseudorandom number below `n`, for pass `pass` of sample `number`.
fn below(number: u64, pass: u64, n: usize) -> usize {
    // The finalizer of SplitMix64.
    let mut x = (number ^ pass << 56).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (u128::from(x ^ x >> 31) * n as u128 >> 64) as usize
}

/// Returns whether all elements are finite, and few of them so large that their squares are not.
fn are_finite(rows: &CubeTensor) -> Result<bool, String> {
    let d = rows.meta.shape()[rows.meta.num_dims() - 1];
    let sums = weighted_sums(rows, &to_device(rows, &vec![1.0; d]));
    Ok(read(sums.squares)?.iter().all(|square| square.is_finite()))
}

/// Compares two results of finite inputs bit by bit; returns the fault, or that the device has no
/// memory for the comparison.
fn find_fault(first: &Guarded, second: &Guarded) -> Option<Finding> {
    match first.find_fault(second) {
        Ok(None) => {}
        Ok(Some(fault)) => return Some(Finding::Wrong(fault)),
        Err(_) => return Some(Finding::Inconclusive),
    }
    match first.count_unwritten() {
        Ok(n) if n > 0.0 => Some(Finding::Wrong(format!("{n:.0} words are not written"))),
        Ok(_) => None,
        Err(_) => Some(Finding::Inconclusive),
    }
}

/// Compares a row of each sample with the same row computed by plain loops.
fn compare_rows(subject: &Subject<'_>, outputs: &Outputs) -> Result<Finding, String> {
    let d_head = subject.d_head();
    let samples = subject.samples();
    let n_units = samples.len() * d_head;
    let numbers = allocate_words(&outputs.y, N_ROW_NUMBERS * n_units);
    let (count, dim) = one_unit_each(&numbers.client, n_units);
    attend::launch(
        &numbers.client,
        count,
        dim,
        subject.qkv.arg(),
        outputs.y.clone().into_buffer_arg(),
        outputs.logs.clone().into_buffer_arg(),
        subject.upload(&samples).into_buffer_arg(),
        numbers.clone().into_buffer_arg(),
        subject.qkv.stride,
        subject.width(),
        subject.qkv.n_rows,
        subject.scale(),
        n_units,
        d_head,
        elem(&outputs.y),
    );
    let numbers = read(numbers)?;
    let mut y = Comparison::default();
    let mut logs = Comparison::default();
    for unit in numbers.chunks_exact(N_ROW_NUMBERS) {
        let [actual, expected, term, actual_log, expected_log] = *unit else { continue };
        y.push(actual, expected, RESULT_SHARE * expected.abs() + TERM_SHARE * term);
        logs.push(actual_log, expected_log, LOG_ERROR + LOG_SHARE * expected_log.abs());
    }
    let y = y.errors();
    let logs = logs.errors();
    for (errors, name) in [(&y, "the output"), (&logs, "the logarithm")] {
        if let Some(unit) = errors.first_wrong {
            let place = describe(&samples[unit / d_head]);
            return Ok(errors.wrong(&format!("{name} of {place}")));
        }
    }
    if y.is_inconclusive {
        return Ok(Finding::Inconclusive);
    }
    Ok(Finding::Right(y.worst.max(logs.worst)))
}

/// Compares products of the gradient of each sample's head and random directions with derivatives
/// in these directions, which plain loops compute.
fn compare_directions(
    subject: &Subject<'_>,
    y: &CubeTensor,
    grad: &Rows,
    gradient: &CubeTensor,
) -> Result<Finding, String> {
    let samples = subject.samples();
    let longest = samples.iter().map(|sample| sample.rows.len()).max().unwrap_or(0);
    let n_units = samples.len() * longest;
    let signs = [random_signs(longest, 1), random_signs(3 * subject.d_head(), 2)].concat();
    let sums = allocate_words(gradient, N_SUMS * n_units);
    let (count, dim) = one_unit_each(&sums.client, n_units);
    differentiate::launch(
        &sums.client,
        count,
        dim,
        subject.qkv.arg(),
        y.clone().into_buffer_arg(),
        grad.arg(),
        gradient.clone().into_buffer_arg(),
        subject.upload(&samples).into_buffer_arg(),
        to_device(gradient, &signs).into_buffer_arg(),
        sums.clone().into_buffer_arg(),
        subject.qkv.stride,
        grad.stride,
        subject.width(),
        subject.scale(),
        longest,
        n_units,
        subject.d_head(),
        elem(gradient),
    );
    let sums = read(sums)?;
    let mut parts = Comparison::default();
    for rows in sums.chunks_exact(N_SUMS * longest) {
        let mut totals = [0.0f64; N_SUMS];
        for row in rows.chunks_exact(N_SUMS) {
            for (total, sum) in totals.iter_mut().zip(row) {
                *total += f64::from(*sum);
            }
        }
        for part in totals.map(|total| total as f32).chunks_exact(4) {
            let [actual, expected, squares, terms] = *part else { continue };
            parts.push(actual, expected, RESULT_SHARE * squares.sqrt() + TERM_SHARE * terms.sqrt());
        }
    }
    let errors = parts.errors();
    if let Some(index) = errors.first_wrong {
        let part = ["queries", "keys", "values"][index % 3];
        let place = describe(&samples[index / 3]);
        return Ok(errors.wrong(&format!("the gradient of {part} of {place}")));
    }
    if errors.is_inconclusive {
        return Ok(Finding::Inconclusive);
    }
    Ok(Finding::Right(errors.worst))
}

/// Returns a description of the place of a sample.
fn describe(sample: &Sample) -> String {
    let Sample { sequence, rows, head, row } = sample;
    format!("token {row} of {}, sequence {sequence}, head {head}", rows.len())
}

/// Numbers, those expected, and the largest errors that are attributed to rounding.
#[derive(Default)]
struct Comparison {
    actual: Vec<f32>,
    expected: Vec<f32>,
    allowed: Vec<f32>,
}

impl Comparison {
    fn push(&mut self, actual: f32, expected: f32, allowed: f32) {
        self.actual.push(actual);
        self.expected.push(expected);
        self.allowed.push(allowed);
    }

    fn errors(&self) -> Errors {
        Errors::new(&self.actual, &self.expected, &self.allowed)
    }
}

impl Errors {
    /// Returns the finding that `what` is wrong.
    fn wrong(&self, what: &str) -> Finding {
        Finding::Wrong(format!("{what} is wrong ({:.1e} times what rounding explains)", self.worst))
    }
}

/// Computes one channel of a sample's row in each unit, with a running maximum. `numbers` has, for
/// each unit, the output, the expected output, the root of the sum of squares of its terms, the
/// logarithm and the expected logarithm.
#[cube(launch)]
fn attend<F: Float>(
    qkv: &[F],
    y: &[F],
    logs: &[f32],
    samples: &[i32],
    numbers: &mut [f32],
    stride: usize,
    width: usize,
    n_tokens: usize,
    scale: f32,
    n_units: usize,
    #[comptime] d_head: usize,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < n_units {
        let sample = ABSOLUTE_POS / d_head;
        let channel = ABSOLUTE_POS % d_head;
        let start = samples[4 * sample] as usize;
        let length = samples[4 * sample + 1] as usize;
        let head = samples[4 * sample + 2] as usize;
        let row = start + samples[4 * sample + 3] as usize;
        let query = row * stride + head * d_head;
        let mut top = f32::new(-3e38f32);
        let mut total = 0.0f32;
        let mut sum = 0.0f32;
        let mut squares = 0.0f32;
        for i in 0..length {
            let key = (start + i) * stride + width + head * d_head;
            let mut score = 0.0f32;
            for c in 0..d_head {
                score += f32::cast_from(qkv[query + c]) * f32::cast_from(qkv[key + c]);
            }
            let scaled = score * scale;
            let larger = max(top, scaled);
            let factor = (top - larger).exp();
            let weight = (scaled - larger).exp();
            let term = weight * f32::cast_from(qkv[key + width + channel]);
            total = total * factor + weight;
            sum = sum * factor + term;
            squares = squares * factor * factor + term * term;
            top = larger;
        }
        let first = ABSOLUTE_POS * N_ROW_NUMBERS;
        numbers[first] = f32::cast_from(y[row * width + head * d_head + channel]);
        numbers[first + 1] = sum / total;
        numbers[first + 2] = squares.sqrt() / total;
        numbers[first + 3] = logs[head * n_tokens + row];
        // log2(e)
        numbers[first + 4] = (top + total.ln()) * 1.442_695_f32;
    }
}

/// Sums the terms of one row of a sample's head in each unit. `sums` has, for each of Q, K and V:
/// the product of the gradient and the direction, the derivative, the squares of the gradient, and
/// those of the terms of the derivative. `signs` has those of rows, then those of columns.
#[cube(launch)]
fn differentiate<F: Float>(
    qkv: &[F],
    y: &[F],
    grad: &[F],
    gradient: &[F],
    samples: &[i32],
    signs: &[f32],
    sums: &mut [f32],
    stride: usize,
    grad_stride: usize,
    width: usize,
    scale: f32,
    longest: usize,
    n_units: usize,
    #[comptime] d_head: usize,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < n_units {
        let sample = ABSOLUTE_POS / longest;
        let row = ABSOLUTE_POS % longest;
        let start = samples[4 * sample] as usize;
        let length = samples[4 * sample + 1] as usize;
        let column = samples[4 * sample + 2] as usize * d_head;
        let first = ABSOLUTE_POS * N_SUMS;
        for i in 0..N_SUMS {
            sums[first + i] = 0.0f32;
        }
        if row < length {
            let query = (start + row) * stride + column;
            let output = (start + row) * grad_stride + column;

            let mut top = f32::new(-3e38f32);
            let mut total = 0.0f32;
            for i in 0..length {
                let key = (start + i) * stride + width + column;
                let mut score = 0.0f32;
                for c in 0..d_head {
                    score += f32::cast_from(qkv[query + c]) * f32::cast_from(qkv[key + c]);
                }
                let scaled = score * scale;
                let larger = max(top, scaled);
                total = total * (top - larger).exp() + (scaled - larger).exp();
                top = larger;
            }

            let mut delta = 0.0f32;
            let mut query_sign = 0.0f32;
            let mut grad_sign = 0.0f32;
            let mut grad_squares = 0.0f32;
            for c in 0..d_head {
                let g = f32::cast_from(grad[output + c]);
                delta += g * f32::cast_from(y[(start + row) * width + column + c]);
                query_sign += f32::cast_from(qkv[query + c]) * signs[longest + d_head + c];
                grad_sign += g * signs[longest + 2 * d_head + c];
                grad_squares += g * g;
            }

            let mut query_sum = 0.0f32;
            let mut key_sum = 0.0f32;
            let mut value_sum = 0.0f32;
            let mut query_squares = 0.0f32;
            let mut key_squares = 0.0f32;
            let mut weight_squares = 0.0f32;
            for i in 0..length {
                let key = (start + i) * stride + width + column;
                let mut score = 0.0f32;
                let mut change = 0.0f32;
                let mut squares = 0.0f32;
                let mut key_sign = 0.0f32;
                for c in 0..d_head {
                    let k = f32::cast_from(qkv[key + c]);
                    let term = f32::cast_from(grad[output + c]) * f32::cast_from(qkv[key + width + c]);
                    score += f32::cast_from(qkv[query + c]) * k;
                    change += term;
                    squares += term * term;
                    key_sign += k * signs[longest + c];
                }
                let weight = (score * scale - top).exp() / total;
                let slope = weight * (change - delta);
                let query_step = scale * signs[row] * key_sign;
                let key_step = scale * signs[i] * query_sign;
                // Of the slope, including a thousandth of what cancels in it.
                let slope_squares = slope * slope + weight * weight * squares * 1e-6f32;
                query_sum += slope * query_step;
                key_sum += slope * key_step;
                value_sum += weight * signs[i] * grad_sign;
                query_squares += slope_squares * query_step * query_step;
                key_squares += slope_squares * key_step * key_step;
                weight_squares += weight * weight;
            }

            for c in 0..d_head {
                let at = 3 * (start + row) * width + column + c;
                let sign = signs[row];
                let gq = f32::cast_from(gradient[at]);
                let gk = f32::cast_from(gradient[at + width]);
                let gv = f32::cast_from(gradient[at + 2 * width]);
                sums[first] += gq * sign * signs[longest + c];
                sums[first + 2] += gq * gq;
                sums[first + 4] += gk * sign * signs[longest + d_head + c];
                sums[first + 6] += gk * gk;
                sums[first + 8] += gv * sign * signs[longest + 2 * d_head + c];
                sums[first + 10] += gv * gv;
            }
            sums[first + 1] = query_sum;
            sums[first + 3] = query_squares;
            sums[first + 5] = key_sum;
            sums[first + 7] = key_squares;
            sums[first + 9] = value_sum;
            sums[first + 11] = weight_squares * grad_squares;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use burn_cubecl::kernel::into_contiguous;
    use burn_tensor::{Device, Tensor};

    use super::super::tests::store;
    use super::*;
    use crate::ops::cube::is_cube;
    use crate::ops::testing::{devices, leaves};

    const N_HEADS: usize = 2;
    const D_HEAD: usize = 64;
    const D: usize = N_HEADS * D_HEAD;

    /// Lengths of the sequences.
    const LENGTHS: [usize; 4] = [21, 5, 5, 1];
    const N_TOKENS: usize = 32;

    /// A fault of a kernel.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Fault {
        None,
        /// All results are a tenth too large.
        Scaled,
        /// A row is not written.
        Unwritten,
        /// The second run rounds one element differently.
        Nondeterministic,
        /// The logarithms are natural.
        Logarithms,
        /// The gradient of queries, of keys or of values is zero.
        Part(usize),
        /// The kernel refuses.
        Refused,
        /// The device has no memory.
        NoMemory,
    }

    /// Attention computed on the host.
    struct Host {
        y: Vec<f32>,
        logs: Vec<f32>,
        qkv_grad: Vec<f32>,
    }

    fn sequences() -> Vec<Range<usize>> {
        let mut sequences = Vec::new();
        let mut start = 0;
        for length in LENGTHS {
            sequences.push(start..start + length);
            start += length;
        }
        sequences
    }

    fn dot(a: &[f32], b: &[f32]) -> f32 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    fn add(sum: &mut [f32], factor: f32, x: &[f32]) {
        for (sum, x) in sum.iter_mut().zip(x) {
            *sum += factor * x;
        }
    }

    fn attend_on_host(qkv: &[f32], grad: &[f32]) -> Host {
        let scale = (D_HEAD as f32).powf(-0.5);
        let mut y = vec![0.0; N_TOKENS * D];
        let mut logs = vec![0.0; N_HEADS * N_TOKENS];
        let mut qkv_grad = vec![0.0; N_TOKENS * 3 * D];
        for rows in sequences() {
            for head in 0..N_HEADS {
                for row in rows.clone() {
                    let first = row * 3 * D + head * D_HEAD;
                    let q = &qkv[first..first + D_HEAD];
                    let out = row * D + head * D_HEAD..row * D + (head + 1) * D_HEAD;
                    let g = &grad[out.clone()];
                    let mut scores = Vec::new();
                    let mut changes = Vec::new();
                    for key in rows.clone() {
                        let first = key * 3 * D + D + head * D_HEAD;
                        scores.push(scale * dot(q, &qkv[first..first + D_HEAD]));
                        changes.push(dot(g, &qkv[first + D..first + D + D_HEAD]));
                    }
                    let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let total: f32 = scores.iter().map(|score| (score - top).exp()).sum();
                    logs[head * N_TOKENS + row] = (top + total.ln()) * std::f32::consts::LOG2_E;
                    let weights: Vec<f32> = scores.iter().map(|score| (score - top).exp() / total).collect();
                    let delta = dot(&weights, &changes);
                    for (i, key) in rows.clone().enumerate() {
                        let k = key * 3 * D + D + head * D_HEAD;
                        let v = k + D;
                        let slope = scale * weights[i] * (changes[i] - delta);
                        add(&mut y[out.clone()], weights[i], &qkv[v..v + D_HEAD]);
                        add(&mut qkv_grad[first..first + D_HEAD], slope, &qkv[k..k + D_HEAD]);
                        add(&mut qkv_grad[k..k + D_HEAD], slope, q);
                        add(&mut qkv_grad[v..v + D_HEAD], weights[i], g);
                    }
                }
            }
        }
        Host { y, logs, qkv_grad }
    }

    fn primitive(values: &[f32], shape: [usize; 2], device: &Device) -> CubeTensor {
        let tensor = Tensor::<2>::from_data(TensorData::new(values.to_vec(), shape), device);
        into_contiguous(tensor.try_into_primitive::<CubeBackend>().unwrap())
    }

    fn values(tensor: Tensor<2>) -> Vec<f32> {
        tensor.into_data().try_to_vec::<f32>().unwrap()
    }

    /// Stores `right` with a fault; `is_second` if this is the second run.
    fn store_faulty(right: &CubeTensor, to: &CubeTensor, fault: Fault, is_second: bool) {
        let n: usize = right.meta.shape().iter().product();
        let d = right.meta.shape()[1];
        let none = 1 << 30;
        match fault {
            Fault::Unwritten => store(right, to, n - d, none, 1.0),
            Fault::Nondeterministic if is_second => store(right, to, n, 7, 1.0 + 1e-6),
            _ => store(right, to, n, none, 1.0),
        }
    }

    fn fail(fault: Fault) -> Result<(), RunError> {
        match fault {
            Fault::Refused => Err(RunError::Library("no".into())),
            Fault::NoMemory => Err(RunError::Device),
            _ => Ok(()),
        }
    }

    fn scaled(values: &[f32], factor: f32) -> Vec<f32> {
        values.iter().map(|value| factor * value).collect()
    }

    /// Checks a forward pass that is computed beforehand and copied with a fault.
    fn check_forward_fault(qkv: &Rows, host: &Host, fault: Fault, device: &Device) -> Finding {
        let sequences = sequences();
        let subject = Subject { qkv, sequences: &sequences, n_heads: N_HEADS, seed: 3 };
        let y_factor = if fault == Fault::Scaled { 1.1 } else { 1.0 };
        let log_factor = if fault == Fault::Logarithms { std::f32::consts::LN_2 } else { 1.0 };
        let y = primitive(&scaled(&host.y, y_factor), [N_TOKENS, D], device);
        let logs = primitive(&scaled(&host.logs, log_factor), [N_HEADS, N_TOKENS], device);
        let n_runs = Cell::new(0);
        check_forward(&subject, &|outputs: &Outputs| {
            n_runs.set(n_runs.get() + 1);
            store_faulty(&y, &outputs.y, fault, n_runs.get() == 2);
            store_faulty(&logs, &outputs.logs, Fault::None, false);
            fail(fault)
        })
    }

    /// Checks a backward pass that is computed beforehand and copied with a fault.
    fn check_backward_fault(qkv: &Rows, grad: &Rows, host: &Host, fault: Fault, device: &Device) -> Finding {
        let sequences = sequences();
        let subject = Subject { qkv, sequences: &sequences, n_heads: N_HEADS, seed: 3 };
        let y = primitive(&host.y, [N_TOKENS, D], device);
        let factor = if fault == Fault::Scaled { 1.1 } else { 1.0 };
        let mut qkv_grad = scaled(&host.qkv_grad, factor);
        if let Fault::Part(part) = fault {
            for row in qkv_grad.chunks_exact_mut(3 * D) {
                row[part * D..(part + 1) * D].fill(0.0);
            }
        }
        let qkv_grad = primitive(&qkv_grad, [N_TOKENS, 3 * D], device);
        let n_runs = Cell::new(0);
        check_backward(&subject, &y, grad, &|out: &CubeTensor| {
            n_runs.set(n_runs.get() + 1);
            store_faulty(&qkv_grad, out, fault, n_runs.get() == 2);
            fail(fault)
        })
    }

    /// Asserts that `finding` is a fault whose description contains `message`.
    fn assert_wrong(finding: &Finding, message: &str) {
        let Finding::Wrong(found) = finding else { panic!("{message}: {finding:?}") };
        assert!(found.contains(message), "{message}: {found}");
    }

    #[test]
    fn every_injected_fault_is_detected() {
        for device in devices() {
            let qkv = leaves(&device, &[[N_TOKENS, 3 * D]], 1).remove(0).inner();
            let grad = leaves(&device, &[[N_TOKENS, D]], 2).remove(0).inner();
            if !is_cube(&qkv) {
                continue;
            }
            let qkv = values(qkv);
            let grad = values(grad);
            let host = attend_on_host(&qkv, &grad);
            let qkv = Rows::new(&primitive(&qkv, [N_TOKENS, 3 * D], &device));
            let grad = Rows::new(&primitive(&grad, [N_TOKENS, D], &device));

            let finding = check_forward_fault(&qkv, &host, Fault::None, &device);
            assert!(matches!(finding, Finding::Right(worst) if worst < 0.1), "{finding:?}");
            for (fault, message) in [
                (Fault::Scaled, "the output of"),
                (Fault::Unwritten, "are not written"),
                (Fault::Nondeterministic, "between two runs"),
                (Fault::Logarithms, "the logarithm of"),
                (Fault::Refused, "no"),
            ] {
                assert_wrong(&check_forward_fault(&qkv, &host, fault, &device), message);
            }
            let finding = check_forward_fault(&qkv, &host, Fault::NoMemory, &device);
            assert_eq!(finding, Finding::Inconclusive);

            let finding = check_backward_fault(&qkv, &grad, &host, Fault::None, &device);
            assert!(matches!(finding, Finding::Right(worst) if worst < 0.1), "{finding:?}");
            for (fault, message) in [
                (Fault::Scaled, "the gradient of"),
                (Fault::Unwritten, "are not written"),
                (Fault::Nondeterministic, "between two runs"),
                (Fault::Part(0), "the gradient of queries"),
                (Fault::Part(1), "the gradient of keys"),
                (Fault::Part(2), "the gradient of values"),
                (Fault::Refused, "no"),
            ] {
                assert_wrong(&check_backward_fault(&qkv, &grad, &host, fault, &device), message);
            }
            let finding = check_backward_fault(&qkv, &grad, &host, Fault::NoMemory, &device);
            assert_eq!(finding, Finding::Inconclusive);
        }
    }

    /// Zeros, and numbers that are not finite, prove nothing.
    #[test]
    fn attention_of_zeros_is_inconclusive() {
        for device in devices() {
            for value in [0.0, f32::NAN] {
                let qkv = vec![value; N_TOKENS * 3 * D];
                let tensor = Tensor::<2>::from_data(TensorData::new(qkv.clone(), [N_TOKENS, 3 * D]), &device);
                if !is_cube(&tensor) {
                    continue;
                }
                let host = attend_on_host(&qkv, &vec![0.0; N_TOKENS * D]);
                let qkv = Rows::new(&primitive(&qkv, [N_TOKENS, 3 * D], &device));
                let finding = check_forward_fault(&qkv, &host, Fault::None, &device);
                assert_eq!(finding, Finding::Inconclusive);
            }
        }
    }

    /// The longest, the shortest and the last sequence are among the samples, and last rows.
    #[test]
    fn samples_cover_the_lengths() {
        for device in devices() {
            let tensor = Tensor::<2>::zeros([N_TOKENS, 3 * D], &device);
            if !is_cube(&tensor) {
                continue;
            }
            let qkv = Rows::new(&primitive(&vec![0.0; N_TOKENS * 3 * D], [N_TOKENS, 3 * D], &device));
            let sequences = sequences();
            for seed in 0..20 {
                let subject = Subject { qkv: &qkv, sequences: &sequences, n_heads: N_HEADS, seed };
                let samples = subject.samples();
                assert_eq!(samples.len(), N_SAMPLES);
                assert_eq!(samples[0].sequence, 0);
                assert_eq!(samples[0].row, 20);
                assert_eq!(samples[1].sequence, 3);
                for Sample { sequence, rows, head, row } in samples {
                    assert_eq!(rows, sequences[sequence]);
                    assert!(head < N_HEADS && row < rows.len());
                }
            }
        }
    }
}
