//! Checks of matrix products, so that wrong kernels do not go unnoticed in training; those of
//! attention are in [`attention`].
//!
//! ```text
//! C · r = A · (B · r) [+ Σ_j bias_j r_j]        r [N] of ±1: errors of rows
//! rᵀ · C = (rᵀ · A) · B [+ bias Σ_i r_i]        r [M] of ±1: errors of columns
//! ```
//!
//! Freivalds' algorithm (1977), for rows and for columns: the right-hand sides are two products of
//! a matrix and a vector, computed by the kernel below, which is a plain loop. A wrong element
//! changes the sums of its row and of its column. In addition, the result is filled with NaN before
//! it is computed, so that elements that are not written are detected; guard words before and after
//! it must remain unchanged; and a second run must be bit-identical.

pub(super) mod attention;

use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, Tensor, TensorData};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::zspace::metadata::Metadata;

use super::{elem, empty, one_unit_each, transposed};
use crate::product_kernels::Finding;

/// Word that is NaN both as f32 and as two bf16.
const POISON: u32 = 0x7fff_7fff;

/// Number of guard words before and after a result: several rows of the smallest tile.
const GUARD_WORDS: usize = 1024;

/// Largest error of a sum that is attributed to rounding: at least twenty times its standard
/// deviation for random factors.
struct Tolerance {
    /// Share of the norm of the row or column of the result, for the rounding of results or the
    /// truncation of factors.
    result_share: f32,
    /// Share of the product of the norms of both factors, divided by √K, for the rounding of
    /// products and of their sums.
    factor_share: f32,
}

/// Tolerance of results in bf16, with 9 bits.
const ROUNDED: Tolerance = Tolerance { result_share: 2e-2, factor_share: 2e-4 };

/// Tolerance of results in f32 of factors in bf16, whose products are exact.
const EXACT: Tolerance = Tolerance { result_share: 1e-3, factor_share: 2e-4 };

/// Tolerance of results in f32 of factors in f32, which NVIDIA's GPUs multiply as TF32, with 11
/// bits.
const TF32: Tolerance = Tolerance { result_share: 1e-2, factor_share: 4e-3 };

/// Failure to compute a product.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum RunError {
    /// The library refused the product.
    Library(String),
    /// The device has no memory for it, or one of its factors is the result of a failure: the check
    /// is inconclusive.
    Device,
}

/// Operation that is fused with a product, and its vector.
#[derive(Debug, Clone)]
pub(super) enum EpilogueTensor {
    /// No operation.
    None,
    /// The vector is added to each row of the result.
    Bias(CubeTensor),
    /// The sums of A over K are stored as well: in `out`, or in newly allocated memory.
    Sums {
        /// `[1, M]` of f32, in which the sums are stored, except by checks.
        out: Option<CubeTensor>,
    },
}

/// Memory that a product is written to.
pub(super) struct Target {
    /// The result, `[.., M, N]`, contiguous.
    pub(super) out: CubeTensor,
    /// The sums of A over K, `[M]`, if they are requested.
    pub(super) sums: Option<CubeTensor>,
}

/// A contiguous matrix of f32 that a product is written or added to.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(super) struct Destination {
    /// The matrix.
    pub(super) out: CubeTensor,
    /// Whether the product is added to its contents.
    pub(super) adds: bool,
}

/// Effect of a product on the contents of its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    /// The product replaces the contents.
    Write,
    /// The product is added to the contents.
    Add,
}

/// Checks `run`, which computes the product of `a` of `[.., M, K]` and `b` of `[.., K, N]` in
/// `dtype`. Runs `run` twice into guarded memory; the results must be bit-identical and agree with
/// `a` and `b` by Freivalds' test; where supported, adding is checked too.
pub(super) fn check(
    a: &CubeTensor,
    b: &CubeTensor,
    epilogue: &EpilogueTensor,
    dtype: DType,
    run: &dyn Fn(&Target, Effect) -> Result<(), RunError>,
) -> Finding {
    let rank = a.meta.num_dims();
    let mut shape: Vec<usize> = a.meta.shape().iter().copied().collect();
    shape[rank - 1] = b.meta.shape()[rank - 1];
    let first = Guarded::new(a, &shape, dtype);
    let second = Guarded::new(a, &shape, dtype);
    let first_target = first.target(epilogue);
    let second_target = second.target(epilogue);
    for target in [&first_target, &second_target] {
        if let Err(error) = run(target, Effect::Write) {
            return error.into_finding();
        }
    }
    // A failed read is inconclusive: memory may have run out, or a factor may be the result of a
    // failure.
    match first.find_fault(&second) {
        Ok(None) => {}
        Ok(Some(fault)) => return Finding::Wrong(fault),
        Err(_) => return Finding::Inconclusive,
    }
    let finding = compare(a, b, epilogue, &first_target, 1.0);
    let supports_addition = dtype == DType::F32 && !matches!(epilogue, EpilogueTensor::Bias(_));
    if !matches!(finding, Finding::Right(_)) || !supports_addition {
        return finding;
    }
    // The gradient of a weight is added to the gradient of an earlier use.
    if let Err(error) = run(&first_target, Effect::Add) {
        return error.into_finding();
    }
    match compare(a, b, epilogue, &first_target, 2.0) {
        Finding::Wrong(fault) => Finding::Wrong(format!("added to itself, {fault}")),
        _ => finding,
    }
}

impl RunError {
    /// Returns the result of a check of a product that could not be computed.
    fn into_finding(self) -> Finding {
        match self {
            Self::Library(reason) => Finding::Wrong(reason),
            Self::Device => Finding::Inconclusive,
        }
    }
}

/// Memory for a result between guards.
struct Guarded {
    /// All words, including the guards.
    words: CubeTensor,
    /// The result, contiguous.
    out: CubeTensor,
}

impl Guarded {
    /// Allocates a result of `shape` on the device of `like`, and fills it with NaN.
    fn new(like: &CubeTensor, shape: &[usize], dtype: DType) -> Self {
        let n_words = (shape.iter().product::<usize>() * dtype.size()).div_ceil(4);
        let words = poisoned(like, n_words + 2 * GUARD_WORDS);
        let out = view_bytes(&words, GUARD_WORDS * 4, shape, dtype);
        Self { words, out }
    }

    /// Returns the result as the target of a product.
    fn target(&self, epilogue: &EpilogueTensor) -> Target {
        let shape = self.out.meta.shape();
        let sums = if matches!(epilogue, EpilogueTensor::Sums { .. }) {
            let m = shape[shape.num_dims() - 2];
            Some(view_bytes(&poisoned(&self.words, m), 0, &[m], self.out.dtype))
        } else {
            None
        };
        Target { out: self.out.clone(), sums }
    }

    /// Returns the number of words of the result that are still as they were at first.
    fn count_unwritten(&self) -> Result<f32, String> {
        const N_UNITS: usize = 4096;
        let counts = allocate_words(&self.words, N_UNITS);
        let (count, dim) = one_unit_each(&counts.client, N_UNITS);
        count_words::launch(
            &counts.client,
            count,
            dim,
            self.words.clone().into_buffer_arg(),
            counts.clone().into_buffer_arg(),
            GUARD_WORDS,
            self.words.meta.shape()[0] - GUARD_WORDS,
            POISON,
            N_UNITS,
        );
        Ok(read(counts)?.iter().sum())
    }

    /// Compares all bits of two results, and their guards with the initial words; returns the
    /// fault, if there is one.
    fn find_fault(&self, other: &Self) -> Result<Option<String>, String> {
        const N_UNITS: usize = 4096;
        let n_words = self.words.meta.shape()[0];
        let counts = allocate_words(&self.words, 2 * N_UNITS);
        let (count, dim) = one_unit_each(&counts.client, N_UNITS);
        count_differences::launch(
            &counts.client,
            count,
            dim,
            self.words.clone().into_buffer_arg(),
            other.words.clone().into_buffer_arg(),
            counts.clone().into_buffer_arg(),
            n_words,
            POISON,
            GUARD_WORDS,
            N_UNITS,
        );
        let counts = read(counts)?;
        let (differences, changed_guards) = counts.split_at(N_UNITS);
        if changed_guards.iter().any(|n| *n > 0.0) {
            return Ok(Some("it writes before or behind its result".into()));
        }
        let n = differences.iter().sum::<f32>();
        if n != 0.0 {
            return Ok(Some(format!("{n:.0} of {n_words} words differ between two runs")));
        }
        Ok(None)
    }
}

/// Compares a result with `scale` times the product of its factors.
fn compare(
    a: &CubeTensor,
    b: &CubeTensor,
    epilogue: &EpilogueTensor,
    target: &Target,
    scale: f32,
) -> Finding {
    let Ok(rows) = row_errors(a, b, epilogue, target, scale) else { return Finding::Inconclusive };
    let Ok(columns) = column_errors(a, b, epilogue, target, scale) else { return Finding::Inconclusive };
    let Ok(sums) = sum_errors(a, target) else { return Finding::Inconclusive };
    let mut worst = 0.0f32;
    for (errors, name) in [(&rows, "row"), (&columns, "column"), (&sums, "sum over K of row")] {
        if let Some(index) = errors.first_wrong {
            return Finding::Wrong(format!(
                "{name} {index} is wrong ({:.1e} times what rounding explains)",
                errors.worst
            ));
        }
        worst = worst.max(errors.worst);
    }
    if rows.is_inconclusive { Finding::Inconclusive } else { Finding::Right(worst) }
}

/// Errors of a vector of sums.
struct Errors {
    /// Index of the first sum that is wrong.
    first_wrong: Option<usize>,
    /// Largest error as a share of the allowed error.
    worst: f32,
    /// Whether all sums are zero, or expected not to be finite.
    is_inconclusive: bool,
}

impl Errors {
    const NONE: Self = Self { first_wrong: None, worst: 0.0, is_inconclusive: true };

    /// Compares sums with the expected ones, given the largest error allowed for each.
    fn new(sums: &[f32], expected: &[f32], allowed: &[f32]) -> Self {
        /// Share of the largest of all allowed errors that is allowed for every sum: squares of
        /// small rows are rounded to zero.
        const FLOOR: f32 = 1e-6;
        let largest = allowed.iter().copied().filter(|allowed| allowed.is_finite()).fold(0.0, f32::max);
        let mut errors = Self::NONE;
        for (index, sum) in sums.iter().enumerate() {
            let expected = expected[index];
            let allowed = allowed[index] + FLOOR * largest;
            // Factors that are not finite are no fault of the product. A result that is not finite,
            // of finite factors, is: its norm is not finite either, but its sum should be.
            if !expected.is_finite() || (!allowed.is_finite() && sum.is_finite()) {
                continue;
            }
            errors.is_inconclusive &= *sum == 0.0 && expected == 0.0;
            let gap = (sum - expected).abs();
            let share = if gap == 0.0 { 0.0 } else { gap / allowed };
            let is_right = share <= 1.0 && sum.is_finite();
            if !is_right && errors.first_wrong.is_none() {
                errors.first_wrong = Some(index);
            }
            errors.worst =
                if is_right || share.is_finite() { errors.worst.max(share) } else { f32::INFINITY };
        }
        errors
    }
}

impl Tolerance {
    /// Returns the tolerance of a product of `a` with the result `out`.
    fn for_product(a: &CubeTensor, out: &CubeTensor) -> Self {
        let Self { result_share, factor_share } = match (a.dtype, out.dtype) {
            (DType::F32, _) => TF32,
            (_, DType::F32) => EXACT,
            _ => ROUNDED,
        };
        let k = a.meta.shape()[a.meta.num_dims() - 1] as f32;
        Self { result_share, factor_share: factor_share / k.sqrt() }
    }
}

fn row_errors(
    a: &CubeTensor,
    b: &CubeTensor,
    epilogue: &EpilogueTensor,
    target: &Target,
    scale: f32,
) -> Result<Errors, String> {
    let rank = b.meta.num_dims();
    let n = b.meta.shape()[rank - 1];
    let signs = random_signs(n, 1);
    let r = to_device(a, &signs);
    let b_rows = weighted_sums(b, &r);
    let a_rows = weighted_sums(a, &b_rows.sums);
    let out_rows = weighted_sums(&target.out, &r);
    let sums = read(out_rows.sums)?;
    let out_norms = read_norms(out_rows.squares)?;
    let mut expected = read(a_rows.sums)?;
    if let EpilogueTensor::Bias(bias) = epilogue {
        let bias_sum: f32 = read(in_f32(bias))?.iter().zip(&signs).map(|(bias, sign)| bias * sign).sum();
        expected.iter_mut().for_each(|sum| *sum += bias_sum);
    }
    let a_norms = read_norms(a_rows.squares)?;
    let b_norm = read_total_norm(b_rows.squares)?;
    let Tolerance { result_share, factor_share } = Tolerance::for_product(a, &target.out);
    expected.iter_mut().for_each(|sum| *sum *= scale);
    let mut allowed = Vec::with_capacity(sums.len());
    for (out_norm, a_norm) in out_norms.iter().zip(&a_norms) {
        allowed.push(result_share * out_norm + scale * factor_share * a_norm * b_norm);
    }
    Ok(Errors::new(&sums, &expected, &allowed))
}

fn column_errors(
    a: &CubeTensor,
    b: &CubeTensor,
    epilogue: &EpilogueTensor,
    target: &Target,
    scale: f32,
) -> Result<Errors, String> {
    let rank = a.meta.num_dims();
    let m = a.meta.shape()[rank - 2];
    let signs = random_signs(m, 2);
    let r = to_device(a, &signs);
    let a_columns = weighted_sums(&transposed(a.clone()), &r);
    let b_columns = weighted_sums(&transposed(b.clone()), &a_columns.sums);
    let out_columns = weighted_sums(&transposed(target.out.clone()), &r);
    let sums = read(out_columns.sums)?;
    let out_norms = read_norms(out_columns.squares)?;
    let mut expected = read(b_columns.sums)?;
    if let EpilogueTensor::Bias(bias) = epilogue {
        let total: f32 = signs.iter().sum();
        for (sum, bias) in expected.iter_mut().zip(read(in_f32(bias))?) {
            *sum += bias * total;
        }
    }
    let b_norms = read_norms(b_columns.squares)?;
    let a_norm = read_total_norm(a_columns.squares)?;
    let Tolerance { result_share, factor_share } = Tolerance::for_product(a, &target.out);
    expected.iter_mut().for_each(|sum| *sum *= scale);
    let mut allowed = Vec::with_capacity(sums.len());
    for (out_norm, b_norm) in out_norms.iter().zip(&b_norms) {
        allowed.push(result_share * out_norm + scale * factor_share * b_norm * a_norm);
    }
    Ok(Errors::new(&sums, &expected, &allowed))
}

fn sum_errors(a: &CubeTensor, target: &Target) -> Result<Errors, String> {
    let Some(sums) = &target.sums else { return Ok(Errors::NONE) };
    let k = a.meta.shape()[a.meta.num_dims() - 1];
    let a_rows = weighted_sums(a, &to_device(a, &vec![1.0; k]));
    let expected = read(a_rows.sums)?;
    let norms = read_norms(a_rows.squares)?;
    let sums = read(in_f32(sums))?;
    // Rounding of sums in another order: a share of the sum itself, and of the norm.
    let norm_share = if a.dtype == DType::F32 { TF32.factor_share } else { EXACT.result_share };
    let mut allowed = Vec::with_capacity(sums.len());
    for (expected, norm) in expected.iter().zip(&norms) {
        allowed.push(EXACT.result_share * expected.abs() + norm_share * norm);
    }
    Ok(Errors::new(&sums, &expected, &allowed))
}

/// Returns `n` pseudorandom numbers of ±1.
fn random_signs(n: usize, seed: u64) -> Vec<f32> {
    let mut signs = Vec::with_capacity(n);
    for i in 0..n {
        // The finalizer of SplitMix64.
        let mut x = (i as u64 ^ seed << 32).wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        signs.push(if (x ^ x >> 31) & 1 == 0 { 1.0 } else { -1.0 });
    }
    signs
}

/// Sums over the rows of matrices.
struct RowSums {
    /// Σ_j x_ij w_j, `[.., rows]`.
    sums: CubeTensor,
    /// Σ_j x_ij², `[.., rows]`.
    squares: CubeTensor,
}

/// Sums the rows of `x` of `[.., rows, columns]`, weighted by `weights` of `[columns]`, or of
/// `[.., columns]` with a vector for each matrix.
fn weighted_sums(x: &CubeTensor, weights: &CubeTensor) -> RowSums {
    let rank = x.meta.num_dims();
    let shape = x.meta.shape();
    let strides = x.meta.strides();
    let rows = shape[rank - 2];
    let columns = shape[rank - 1];
    let n_batches: usize = shape.iter().take(rank - 2).product();
    let batch_stride = if n_batches > 1 { strides[rank - 3] } else { 0 };
    let is_shared = weights.meta.shape()[weights.meta.num_dims() - 1] * n_batches
        != weights.meta.shape().iter().product::<usize>();
    let mut sums = empty(x, [n_batches * rows], DType::F32);
    let mut squares = empty(x, [n_batches * rows], DType::F32);
    let (count, dim) = one_unit_each(&x.client, n_batches * rows);
    sum_rows::launch(
        &x.client,
        count,
        dim,
        x.clone().into_buffer_arg(),
        weights.clone().into_buffer_arg(),
        sums.clone().into_buffer_arg(),
        squares.clone().into_buffer_arg(),
        rows,
        columns,
        n_batches,
        batch_stride,
        strides[rank - 2],
        strides[rank - 1],
        if is_shared { 0 } else { columns },
        elem(x),
    );
    *sums.meta = Metadata::new([n_batches, rows], [rows, 1]);
    *squares.meta = Metadata::new([n_batches, rows], [rows, 1]);
    RowSums { sums, squares }
}

/// Copies numbers to the device of `like`.
fn to_device(like: &CubeTensor, values: &[f32]) -> CubeTensor {
    CubeBackend::float_from_data(TensorData::new(values.to_vec(), [values.len()]), &like.device)
}

fn in_f32(tensor: &CubeTensor) -> CubeTensor {
    super::cast(tensor.clone(), DType::F32)
}

/// Copies f32 numbers to the host.
fn read(tensor: CubeTensor) -> Result<Vec<f32>, String> {
    let n: usize = tensor.meta.shape().iter().product();
    let flat = CubeBackend::float_reshape(tensor, [n].into());
    let tensor = Tensor::<1>::from_primitive::<CubeBackend>(flat);
    crate::device::readback::read_back(tensor).map_err(|failure| failure.reason)
}

fn read_norms(squares: CubeTensor) -> Result<Vec<f32>, String> {
    Ok(read(squares)?.into_iter().map(f32::sqrt).collect())
}

fn read_total_norm(squares: CubeTensor) -> Result<f32, String> {
    Ok(read(squares)?.iter().sum::<f32>().sqrt())
}

/// Allocates `n` words, as numbers of f32.
fn allocate_words(like: &CubeTensor, n: usize) -> CubeTensor {
    empty(like, [n], DType::F32)
}

/// Allocates `n` words that are NaN.
fn poisoned(like: &CubeTensor, n: usize) -> CubeTensor {
    let words = allocate_words(like, n);
    let (count, dim) = one_unit_each(&words.client, n);
    fill::launch(&words.client, count, dim, words.clone().into_buffer_arg(), n, POISON);
    words
}

/// Returns a view of `words` from byte `start` on as a contiguous tensor.
fn view_bytes(words: &CubeTensor, start: usize, shape: &[usize], dtype: DType) -> CubeTensor {
    let n_bytes = shape.iter().product::<usize>() * dtype.size();
    let total_bytes = words.meta.shape()[0] * 4;
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim];
    }
    let handle = words.handle.clone().offset_start(start as u64);
    let handle = handle.offset_end((total_bytes - start - n_bytes) as u64);
    let meta = Metadata::new(shape.to_vec(), strides);
    CubeTensor::new(words.client.clone(), handle, meta, words.device.clone(), dtype)
}

#[cube(launch)]
fn fill(words: &mut [u32], n: usize, word: u32) {
    if ABSOLUTE_POS < n {
        words[ABSOLUTE_POS] = word;
    }
}

/// Counts words of `a` that differ from those of `b`, and guard words of either that are not
/// `poison`: both counts for each unit.
#[cube(launch)]
fn count_differences(
    a: &[u32],
    b: &[u32],
    counts: &mut [f32],
    n_words: usize,
    poison: u32,
    #[comptime] guard: usize,
    #[comptime] n_units: usize,
) {
    if ABSOLUTE_POS < n_units {
        let mut differences = 0.0f32;
        let mut changed_guards = 0.0f32;
        for i in range_stepped(ABSOLUTE_POS, n_words, n_units) {
            if a[i] != b[i] {
                differences += 1.0f32;
            }
            if (i < guard || i >= n_words - guard) && (a[i] != poison || b[i] != poison) {
                changed_guards += 1.0f32;
            }
        }
        counts[ABSOLUTE_POS] = differences;
        counts[n_units + ABSOLUTE_POS] = changed_guards;
    }
}

/// Counts the words from `start` to `end` that are equal to `word`: a count for each unit.
#[cube(launch)]
fn count_words(
    words: &[u32],
    counts: &mut [f32],
    start: usize,
    end: usize,
    word: u32,
    #[comptime] n_units: usize,
) {
    if ABSOLUTE_POS < n_units {
        let mut n = 0.0f32;
        for i in range_stepped(start + ABSOLUTE_POS, end, n_units) {
            if words[i] == word {
                n += 1.0f32;
            }
        }
        counts[ABSOLUTE_POS] = n;
    }
}

/// Sums one row in each unit, from the first column to the last.
#[cube(launch)]
fn sum_rows<F: Float>(
    x: &[F],
    weights: &[f32],
    sums: &mut [f32],
    squares: &mut [f32],
    n_rows: usize,
    n_columns: usize,
    n_batches: usize,
    batch_stride: usize,
    row_stride: usize,
    column_stride: usize,
    weights_stride: usize,
    #[define(F)] _dtype: ElemType,
) {
    let batch = ABSOLUTE_POS / n_rows;
    let row = ABSOLUTE_POS % n_rows;
    if batch < n_batches {
        let start = batch * batch_stride + row * row_stride;
        let mut sum = 0.0f32;
        let mut square = 0.0f32;
        for column in 0..n_columns {
            let value = f32::cast_from(x[start + column * column_stride]);
            sum += value * weights[batch * weights_stride + column];
            square += value * value;
        }
        sums[ABSOLUTE_POS] = sum;
        squares[ABSOLUTE_POS] = square;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::ops::cube::is_cube;
    use crate::ops::testing::{devices, leaves};

    /// A fault of a kernel.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Fault {
        None,
        /// One column is twice as large.
        Column,
        /// One element is three times as large.
        Element,
        /// The last element is not written.
        Unwritten,
        /// The word after the result is written.
        OutOfBounds,
        /// The second run rounds one element differently.
        Nondeterministic,
        /// The bias is not added.
        NoBias,
        /// The sums of one row of A are wrong.
        Sums,
        /// The product overwrites the contents to which it should be added.
        Overwritten,
        /// The library refuses the product.
        Refused,
        /// The device has no memory.
        NoMemory,
    }

    #[cube(launch)]
    fn copy(x: &[f32], y: &mut [f32], n: usize, faulty: usize, factor: f32, offset: usize) {
        if ABSOLUTE_POS < n {
            if ABSOLUTE_POS == faulty {
                y[offset + ABSOLUTE_POS] = x[ABSOLUTE_POS] * factor;
            } else {
                y[offset + ABSOLUTE_POS] = x[ABSOLUTE_POS];
            }
        }
    }

    /// Copies `n` elements to a target, and multiplies element `faulty` by `factor`.
    pub(super) fn store(x: &CubeTensor, y: &CubeTensor, n: usize, faulty: usize, factor: f32) {
        let (count, dim) = one_unit_each(&x.client, n);
        let x = x.clone();
        let y = y.clone();
        copy::launch(
            &x.client.clone(),
            count,
            dim,
            x.into_buffer_arg(),
            y.into_buffer_arg(),
            n,
            faulty,
            factor,
            0,
        );
    }

    fn primitive<const D: usize>(x: Tensor<D>) -> CubeTensor {
        x.try_into_primitive::<CubeBackend>().unwrap()
    }

    /// Checks a product of `a` and `b` that is computed beforehand and copied with a fault.
    fn check_fault(a: &CubeTensor, b: &CubeTensor, epilogue: &EpilogueTensor, fault: Fault) -> Finding {
        let m = a.meta.shape()[0];
        let n = b.meta.shape()[1];
        let mut right = CubeBackend::float_matmul(a.clone(), b.clone());
        if let EpilogueTensor::Bias(bias) = epilogue
            && fault != Fault::NoBias
        {
            right = CubeBackend::float_add(right, CubeBackend::float_reshape(bias.clone(), [1, n].into()));
        }
        let right = burn_cubecl::kernel::into_contiguous(right);
        let sums = CubeBackend::float_reshape(CubeBackend::float_sum_dim(a.clone(), 1), [m].into());
        let run_number = Cell::new(0);
        check(a, b, epilogue, DType::F32, &|target: &Target, effect: Effect| {
            run_number.set(run_number.get() + 1);
            let none = 1 << 30;
            let mut out = target.out.clone();
            let sum = CubeBackend::float_mul_scalar(right.clone(), 2.0f32.into());
            let right = if effect == Effect::Add && fault != Fault::Overwritten { &sum } else { &right };
            match fault {
                Fault::Column => {
                    let wide = Tensor::<2>::from_primitive::<CubeBackend>(right.clone());
                    let column = wide.clone().slice([0..m, 3..4]) * 2.0;
                    let wrong = wide.slice_assign([0..m, 3..4], column);
                    store(&primitive(wrong), &out, m * n, none, 1.0);
                }
                Fault::Element => store(right, &out, m * n, 2 * n + 5, 3.0),
                Fault::Unwritten => store(right, &out, m * n - 1, none, 1.0),
                Fault::Nondeterministic if run_number.get() == 2 => store(right, &out, m * n, 7, 1.0 + 1e-6),
                Fault::Refused => return Err(RunError::Library("no".into())),
                Fault::NoMemory => return Err(RunError::Device),
                _ => store(right, &out, m * n, none, 1.0),
            }
            if fault == Fault::OutOfBounds {
                // The guard is in the same memory.
                let end = out.handle.offset_end.unwrap();
                out.handle.offset_end = Some(end - 4);
                let longer = CubeBackend::float_cat(
                    vec![
                        CubeBackend::float_reshape(right.clone(), [m * n].into()),
                        CubeBackend::float_ones([1].into(), &right.device, burn_tensor::FloatDType::F32),
                    ],
                    0,
                );
                store(&longer, &out, m * n + 1, none, 1.0);
            }
            if let Some(target_sums) = &target.sums {
                let factor = if fault == Fault::Sums { 1.5 } else { 1.0 };
                store(&sums, target_sums, m, 4, factor);
            }
            Ok(())
        })
    }

    /// Injects every fault, with plain and with transposed factors.
    #[test]
    fn every_injected_fault_is_detected() {
        for device in devices() {
            let x = leaves(&device, &[[37, 80]], 1).remove(0).inner();
            if !is_cube(&x) {
                continue;
            }
            let a = primitive(x);
            let b = primitive(leaves(&device, &[[80, 24]], 2).remove(0).inner());
            let bt = primitive(leaves(&device, &[[24, 80]], 3).remove(0).inner());
            let bias = primitive(leaves(&device, &[[1, 24]], 4).remove(0).inner());
            let bias = CubeBackend::float_reshape(bias, [24].into());
            for b in [b, transposed(bt)] {
                let no_epilogue = EpilogueTensor::None;
                let with_bias = EpilogueTensor::Bias(bias.clone());
                let with_sums = EpilogueTensor::Sums { out: None };
                for epilogue in [&no_epilogue, &with_bias, &with_sums] {
                    let finding = check_fault(&a, &b, epilogue, Fault::None);
                    assert!(matches!(finding, Finding::Right(worst) if worst < 1.0), "{finding:?}");
                }
                let faults = [
                    (&no_epilogue, Fault::Column, "is wrong"),
                    (&no_epilogue, Fault::Element, "is wrong"),
                    (&no_epilogue, Fault::Unwritten, "is wrong"),
                    (&no_epilogue, Fault::OutOfBounds, "before or behind"),
                    (&no_epilogue, Fault::Nondeterministic, "between two runs"),
                    (&no_epilogue, Fault::Overwritten, "added to itself"),
                    (&no_epilogue, Fault::Refused, "no"),
                    (&with_bias, Fault::NoBias, "is wrong"),
                    (&with_sums, Fault::Sums, "sum over K of row 4"),
                ];
                for (epilogue, fault, message) in faults {
                    let finding = check_fault(&a, &b, epilogue, fault);
                    let Finding::Wrong(found) = &finding else { panic!("{fault:?}: {finding:?}") };
                    assert!(found.contains(message), "{message}: {finding:?}");
                }
                let finding = check_fault(&a, &b, &no_epilogue, Fault::NoMemory);
                assert_eq!(finding, Finding::Inconclusive);
            }
        }
    }

    /// Batches of zeros.
    #[test]
    fn products_of_zeros_are_inconclusive() {
        for device in devices() {
            let product = Tensor::<3>::zeros([3, 5, 6], &device);
            if !is_cube(&product) {
                continue;
            }
            let product = primitive(product);
            let a = primitive(Tensor::<3>::zeros([3, 5, 8], &device));
            let b = primitive(Tensor::<3>::zeros([3, 8, 6], &device));
            let finding = check(&a, &b, &EpilogueTensor::None, DType::F32, &|target: &Target, _: Effect| {
                store(&product, &target.out, 90, 1 << 30, 1.0);
                Ok(())
            });
            assert_eq!(finding, Finding::Inconclusive);
        }
    }

    /// Returns the first wrong sum of two, the first of which is right, and whether the comparison
    /// is inconclusive.
    fn compare_sum(sum: f32, expected: f32, allowed: f32) -> (Option<usize>, bool) {
        let errors = Errors::new(&[1.0, sum], &[1.0, expected], &[1.0, allowed]);
        (errors.first_wrong, errors.is_inconclusive)
    }

    /// A factor that is not finite is no fault of the product; a result that is not finite, of
    /// finite factors, is one.
    #[test]
    fn sums_of_factors_that_are_not_finite_are_ignored() {
        assert_eq!(compare_sum(2.0, 2.5, 1.0), (None, false));
        assert_eq!(compare_sum(2.0, 3.5, 1.0), (Some(1), false));
        assert_eq!(compare_sum(f32::NAN, 2.0, 1.0), (Some(1), false));
        assert_eq!(compare_sum(f32::NAN, 2.0, f32::NAN), (Some(1), false));
        assert_eq!(compare_sum(f32::NAN, f32::NAN, f32::NAN), (None, false));
        assert_eq!(compare_sum(f32::INFINITY, f32::INFINITY, 1.0), (None, false));
        // Squares of numbers this small are zero.
        assert_eq!(compare_sum(1e-30, 1.001e-30, 0.0), (None, false));
        let errors = Errors::new(&[f32::NAN, 0.0], &[f32::NAN, 0.0], &[f32::NAN, 1.0]);
        assert!(errors.is_inconclusive && errors.first_wrong.is_none());
    }

    /// Batches of matrices, of which one product has a wrong element.
    #[test]
    fn wrong_products_in_batches_are_detected() {
        for device in devices() {
            let a = leaves(&device, &[[4, 12, 16]], 1).remove(0).inner();
            let b = leaves(&device, &[[4, 16, 20]], 2).remove(0).inner();
            if !is_cube(&a) {
                continue;
            }
            let right = burn_cubecl::kernel::into_contiguous(primitive(a.clone().matmul(b.clone())));
            let a = primitive(a);
            let b = primitive(b);
            for (factor, is_right) in [(1.0, true), (3.0, false)] {
                let twice = CubeBackend::float_mul_scalar(right.clone(), 2.0f32.into());
                let finding =
                    check(&a, &b, &EpilogueTensor::None, DType::F32, &|target: &Target, effect: Effect| {
                        let product = if effect == Effect::Add { &twice } else { &right };
                        store(product, &target.out, 960, 2 * 240 + 17, factor);
                        Ok(())
                    });
                assert_eq!(matches!(finding, Finding::Right(_)), is_right, "{finding:?}");
            }
        }
    }
}
