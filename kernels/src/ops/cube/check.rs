//! Checks of matrix products, so that no wrong kernel trains without a word.
//!
//! ```text
//! C · r = A · (B · r) [+ Σ_j bias_j r_j]        r [N] of ±1: errors of rows
//! rᵀ · C = (rᵀ · A) · B [+ bias Σ_i r_i]        r [M] of ±1: errors of columns
//! ```
//!
//! Freivalds' test (1977), on both sides: the right-hand sides take two products of a matrix and a
//! vector by the kernel below, which is a loop. An element that is wrong changes one sum of its row
//! and one of its column by itself. Beside it, the result is filled with NaN before it is computed,
//! so that elements that are not written are found; words before and behind it must stay as they
//! are; and a second run must give the same bits.

use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, Tensor, TensorData};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::zspace::metadata::Metadata;

use super::{elem, empty, one_unit_each};
use crate::products::Finding;

/// A word that is NaN as f32 and as two bf16.
const POISON: u32 = 0x7fff_7fff;

/// Words of a guard before and behind a result: several rows of the smallest tile.
const GUARD_WORDS: usize = 1024;

/// Largest error of a sum that rounding explains: twenty times its standard deviation at least, for
/// random factors.
struct Tolerance {
    /// Share of the norm of the row or column of the result: from how results are rounded, or all
    /// factors are truncated.
    of_result: f32,
    /// Share of the product of the norms of both factors, divided by √K: from how each product is
    /// rounded, and how they are added.
    of_factors: f32,
}

/// Results in bf16, with 9 bits.
const ROUNDED: Tolerance = Tolerance { of_result: 2e-2, of_factors: 2e-4 };

/// Results in f32 of factors in bf16, whose products are exact.
const EXACT: Tolerance = Tolerance { of_result: 1e-3, of_factors: 2e-4 };

/// Results in f32 of factors in f32, which NVIDIA's GPUs multiply as TF32, with 11 bits.
const TF32: Tolerance = Tolerance { of_result: 1e-2, of_factors: 4e-3 };

/// Failure to compute a product.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum NotRun {
    /// The library refused it.
    ByLibrary(String),
    /// The device has no memory for it, or one of its factors comes of a failure: nothing is said
    /// of the product.
    ByDevice,
}

/// A vector beside a product.
#[derive(Debug, Clone)]
pub(super) enum Beside {
    None,
    /// It is added to each row of the result.
    Bias(CubeTensor),
    /// The sums of A over K are stored as well: `into` a part of a buffer, or in memory of their
    /// own.
    Sums {
        /// `[1, M]` of f32, in which they are stored without a check.
        into: Option<CubeTensor>,
    },
}

/// Memory that a product is written to.
pub(super) struct Target {
    /// The result, `[.., M, N]`, contiguous.
    pub(super) out: CubeTensor,
    /// The sums of A over K, `[M]`, if they are wanted.
    pub(super) sums: Option<CubeTensor>,
}

/// A contiguous matrix of f32 that a product is written or added to.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(super) struct Into {
    pub(super) out: CubeTensor,
    pub(super) adds: bool,
}

/// Checks `run`, which computes the product of `a` of `[.., M, K]` and `b` of `[.., K, N]`, in
/// `dtype`, into a target, or adds it to what is there. Its errors are those of the library.
pub(super) fn check(
    a: &CubeTensor,
    b: &CubeTensor,
    beside: &Beside,
    dtype: DType,
    run: &dyn Fn(&Target, bool) -> Result<(), NotRun>,
) -> Finding {
    let first = Guarded::new(a, b, beside, dtype);
    let second = Guarded::new(a, b, beside, dtype);
    for target in [&first.target, &second.target] {
        if let Err(failure) = run(target, false) {
            return failure.verdict();
        }
    }
    // What cannot be read says nothing about the product: memory may have run out, or a factor may
    // come of a failure.
    match first.same_bits_and_guards(&second) {
        Ok(None) => {}
        Ok(Some(fault)) => return Finding::Wrong(fault),
        Err(_) => return Finding::Nothing,
    }
    let once = compare(a, b, beside, &first.target, 1.0);
    if !matches!(once, Finding::Right(_)) || dtype != DType::F32 || matches!(beside, Beside::Bias(_)) {
        return once;
    }
    // The gradient of a weight is added to that of an earlier use.
    if let Err(failure) = run(&first.target, true) {
        return failure.verdict();
    }
    match compare(a, b, beside, &first.target, 2.0) {
        Finding::Wrong(fault) => Finding::Wrong(format!("added to itself, {fault}")),
        _ => once,
    }
}

impl NotRun {
    /// Returns the finding about a product that could not be computed.
    fn verdict(self) -> Finding {
        match self {
            Self::ByLibrary(reason) => Finding::Wrong(reason),
            Self::ByDevice => Finding::Nothing,
        }
    }
}

/// Memory for a result between guards.
struct Guarded {
    /// All words.
    words: CubeTensor,
    target: Target,
}

impl Guarded {
    /// Allocates a result and fills it with NaN.
    fn new(a: &CubeTensor, b: &CubeTensor, beside: &Beside, dtype: DType) -> Self {
        let rank = a.meta.num_dims();
        let mut shape: Vec<usize> = a.meta.shape().iter().copied().collect();
        shape[rank - 1] = b.meta.shape()[rank - 1];
        let n_words = (shape.iter().product::<usize>() * dtype.size()).div_ceil(4);
        let words = poisoned(a, n_words + 2 * GUARD_WORDS);
        let out = within(&words, GUARD_WORDS * 4, &shape, dtype);
        let sums = matches!(beside, Beside::Sums { .. }).then(|| {
            let m = shape[rank - 2];
            within(&poisoned(a, m), 0, &[m], dtype)
        });
        Self { words, target: Target { out, sums } }
    }

    /// Compares all bits of two results, and their guards with what was there before; returns the
    /// fault, if there is one.
    fn same_bits_and_guards(&self, other: &Self) -> Result<Option<String>, String> {
        const N_UNITS: usize = 4096;
        let n_words = self.words.meta.shape()[0];
        let found = words(&self.words, 2 * N_UNITS);
        let (count, dim) = one_unit_each(&found.client, N_UNITS);
        count_differences::launch(
            &found.client,
            count,
            dim,
            self.words.clone().into_buffer_arg(),
            other.words.clone().into_buffer_arg(),
            found.clone().into_buffer_arg(),
            n_words,
            POISON,
            GUARD_WORDS,
            N_UNITS,
        );
        let found = read(found)?;
        let (differences, guards) = found.split_at(N_UNITS);
        if guards.iter().any(|n| *n > 0.0) {
            return Ok(Some("it writes before or behind its result".into()));
        }
        let n = differences.iter().sum::<f32>();
        Ok((n != 0.0).then(|| format!("{n:.0} of {n_words} words differ between two runs")))
    }
}

/// Compares a result with `times` the product of its factors.
fn compare(a: &CubeTensor, b: &CubeTensor, beside: &Beside, target: &Target, times: f32) -> Finding {
    let found = errors_of_rows(a, b, beside, target, times).and_then(|rows| {
        let columns = errors_of_columns(a, b, beside, target, times)?;
        let sums = errors_of_sums(a, target)?;
        Ok([rows, columns, sums])
    });
    let errors = match found {
        Ok(errors) => errors,
        Err(_) => return Finding::Nothing,
    };
    let mut worst = 0.0f32;
    for (errors, of) in errors.iter().zip(["row", "column", "sum over K of row"]) {
        if let Some(number) = errors.wrong {
            return Finding::Wrong(format!(
                "{of} {number} is wrong ({:.1e} times what rounding explains)",
                errors.worst
            ));
        }
        worst = worst.max(errors.worst);
    }
    if errors[0].says_nothing { Finding::Nothing } else { Finding::Right(worst) }
}

/// Errors of a vector of sums.
struct Errors {
    /// Number of the first sum that is wrong.
    wrong: Option<usize>,
    /// Largest error as a share of what is allowed.
    worst: f32,
    /// Whether all sums are zero, or should not be finite.
    says_nothing: bool,
}

impl Errors {
    const NONE: Self = Self { wrong: None, worst: 0.0, says_nothing: true };

    /// Compares sums with what they should be, given the largest error of each.
    fn of(sums: &[f32], right: &[f32], allowed: &[f32]) -> Self {
        /// Share of the largest of all errors that is allowed everywhere: squares of small rows are
        /// rounded to zero.
        const FLOOR: f32 = 1e-6;
        let largest = allowed.iter().copied().filter(|allowed| allowed.is_finite()).fold(0.0, f32::max);
        let mut errors = Self::NONE;
        for (number, sum) in sums.iter().enumerate() {
            let right = right[number];
            let allowed = allowed[number] + FLOOR * largest;
            // Factors that are not finite are no fault of the product. A result that is not finite,
            // of factors that are, is: its norm is not finite either, but its sum should be.
            if !right.is_finite() || (!allowed.is_finite() && sum.is_finite()) {
                continue;
            }
            errors.says_nothing &= *sum == 0.0 && right == 0.0;
            let gap = (sum - right).abs();
            let share = if gap == 0.0 { 0.0 } else { gap / allowed };
            let is_right = share <= 1.0 && sum.is_finite();
            if !is_right && errors.wrong.is_none() {
                errors.wrong = Some(number);
            }
            errors.worst =
                if is_right || share.is_finite() { errors.worst.max(share) } else { f32::INFINITY };
        }
        errors
    }
}

impl Tolerance {
    /// Returns the tolerance of a product of `a` with the result `out`.
    fn of(a: &CubeTensor, out: &CubeTensor) -> Self {
        let Self { of_result, of_factors } = match (a.dtype, out.dtype) {
            (DType::F32, _) => TF32,
            (_, DType::F32) => EXACT,
            _ => ROUNDED,
        };
        let k = a.meta.shape()[a.meta.num_dims() - 1] as f32;
        Self { of_result, of_factors: of_factors / k.sqrt() }
    }
}

fn errors_of_rows(
    a: &CubeTensor,
    b: &CubeTensor,
    beside: &Beside,
    target: &Target,
    times: f32,
) -> Result<Errors, String> {
    let rank = b.meta.num_dims();
    let n = b.meta.shape()[rank - 1];
    let signs = signs(n, 1);
    let r = vector(a, &signs);
    let of_b = weighted_sums(b, &r);
    let of_a = weighted_sums(a, &of_b.sums);
    let of_out = weighted_sums(&target.out, &r);
    let sums = read(of_out.sums)?;
    let norms = norms(of_out.squares)?;
    let mut right = read(of_a.sums)?;
    if let Beside::Bias(bias) = beside {
        let added: f32 = read(in_f32(bias))?.iter().zip(&signs).map(|(bias, sign)| bias * sign).sum();
        right.iter_mut().for_each(|sum| *sum += added);
    }
    let of_a = self::norms(of_a.squares)?;
    let of_b = total_norm(of_b.squares)?;
    let Tolerance { of_result, of_factors } = Tolerance::of(a, &target.out);
    right.iter_mut().for_each(|sum| *sum *= times);
    let allowed =
        norms.iter().zip(&of_a).map(|(norm, of_a)| of_result * norm + times * of_factors * of_a * of_b);
    Ok(Errors::of(&sums, &right, &allowed.collect::<Vec<_>>()))
}

fn errors_of_columns(
    a: &CubeTensor,
    b: &CubeTensor,
    beside: &Beside,
    target: &Target,
    times: f32,
) -> Result<Errors, String> {
    let rank = a.meta.num_dims();
    let m = a.meta.shape()[rank - 2];
    let signs = signs(m, 2);
    let r = vector(a, &signs);
    let [a_columns, b_columns, out_columns] = [a, b, &target.out].map(|x| super::transposed(x.clone()));
    let of_a = weighted_sums(&a_columns, &r);
    let of_b = weighted_sums(&b_columns, &of_a.sums);
    let of_out = weighted_sums(&out_columns, &r);
    let sums = read(of_out.sums)?;
    let norms = norms(of_out.squares)?;
    let mut right = read(of_b.sums)?;
    if let Beside::Bias(bias) = beside {
        let total: f32 = signs.iter().sum();
        for (sum, bias) in right.iter_mut().zip(read(in_f32(bias))?) {
            *sum += bias * total;
        }
    }
    let of_b = self::norms(of_b.squares)?;
    let of_a = total_norm(of_a.squares)?;
    let Tolerance { of_result, of_factors } = Tolerance::of(a, &target.out);
    right.iter_mut().for_each(|sum| *sum *= times);
    let allowed =
        norms.iter().zip(&of_b).map(|(norm, of_b)| of_result * norm + times * of_factors * of_b * of_a);
    Ok(Errors::of(&sums, &right, &allowed.collect::<Vec<_>>()))
}

fn errors_of_sums(a: &CubeTensor, target: &Target) -> Result<Errors, String> {
    let Some(sums) = &target.sums else { return Ok(Errors::NONE) };
    let k = a.meta.shape()[a.meta.num_dims() - 1];
    let of_a = weighted_sums(a, &vector(a, &vec![1.0; k]));
    let right = read(of_a.sums)?;
    let norms = norms(of_a.squares)?;
    let sums = read(in_f32(sums))?;
    // Rounding of sums in another order: a share of the sum itself, and of the norm.
    let norm_tolerance = if a.dtype == DType::F32 { TF32.of_factors } else { EXACT.of_result };
    let allowed =
        right.iter().zip(&norms).map(|(right, norm)| EXACT.of_result * right.abs() + norm_tolerance * norm);
    Ok(Errors::of(&sums, &right, &allowed.collect::<Vec<_>>()))
}

/// Returns `n` numbers of ±1.
fn signs(n: usize, seed: u64) -> Vec<f32> {
    (0..n)
        .map(|i: usize| {
            // The finalizer of SplitMix64.
            let mut x = (i as u64 ^ seed << 32).wrapping_add(0x9e37_79b9_7f4a_7c15);
            x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            if (x ^ x >> 31) & 1 == 0 { 1.0 } else { -1.0 }
        })
        .collect()
}

/// Sums over the rows of matrices.
struct RowSums {
    /// Σ_j x_ij w_j, `[.., rows]`.
    sums: CubeTensor,
    /// Σ_j x_ij², `[.., rows]`.
    squares: CubeTensor,
}

/// Sums the rows of `x` of `[.., rows, columns]`, weighted by `weights`: `[columns]`, or `[..,
/// columns]` with a vector for each matrix.
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
    let out = [(); 2].map(|()| empty(x, [n_batches * rows], DType::F32));
    let (count, dim) = one_unit_each(&x.client, n_batches * rows);
    sum_rows::launch(
        &x.client,
        count,
        dim,
        x.clone().into_buffer_arg(),
        weights.clone().into_buffer_arg(),
        out[0].clone().into_buffer_arg(),
        out[1].clone().into_buffer_arg(),
        rows,
        columns,
        n_batches,
        batch_stride,
        strides[rank - 2],
        strides[rank - 1],
        if is_shared { 0 } else { columns },
        elem(x),
    );
    let [sums, squares] = out;
    let shaped = |mut tensor: CubeTensor| {
        *tensor.meta = Metadata::new([n_batches, rows], [rows, 1]);
        tensor
    };
    RowSums { sums: shaped(sums), squares: shaped(squares) }
}

/// Copies numbers to the device of `like`.
fn vector(like: &CubeTensor, values: &[f32]) -> CubeTensor {
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

fn norms(squares: CubeTensor) -> Result<Vec<f32>, String> {
    Ok(read(squares)?.into_iter().map(f32::sqrt).collect())
}

fn total_norm(squares: CubeTensor) -> Result<f32, String> {
    Ok(read(squares)?.iter().sum::<f32>().sqrt())
}

/// Allocates numbers of f32 for `n` words.
fn words(like: &CubeTensor, n: usize) -> CubeTensor {
    empty(like, [n], DType::F32)
}

/// Allocates `n` words that are NaN.
fn poisoned(like: &CubeTensor, n: usize) -> CubeTensor {
    let words = words(like, n);
    let (count, dim) = one_unit_each(&words.client, n);
    fill::launch(&words.client, count, dim, words.clone().into_buffer_arg(), n, POISON);
    words
}

/// Returns a part of `words` from byte `start` on as a contiguous tensor.
fn within(words: &CubeTensor, start: usize, shape: &[usize], dtype: DType) -> CubeTensor {
    let n_bytes = shape.iter().product::<usize>() * dtype.size();
    let all = words.meta.shape()[0] * 4;
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim];
    }
    let handle = words.handle.clone().offset_start(start as u64);
    let handle = handle.offset_end((all - start - n_bytes) as u64);
    let meta = Metadata::new(shape.to_vec(), strides);
    CubeTensor::new(words.client.clone(), handle, meta, words.device.clone(), dtype)
}

#[cube(launch)]
fn fill(words: &mut [u32], n: usize, word: u32) {
    if ABSOLUTE_POS < n {
        words[ABSOLUTE_POS] = word;
    }
}

/// Counts words of `a` that differ from those of `b`, and words of the guards of both that are not
/// `poison`: a count of each for each unit.
#[cube(launch)]
fn count_differences(
    a: &[u32],
    b: &[u32],
    found: &mut [f32],
    n_words: usize,
    poison: u32,
    #[comptime] guard: usize,
    #[comptime] n_units: usize,
) {
    if ABSOLUTE_POS < n_units {
        let mut differences = 0.0f32;
        let mut guards = 0.0f32;
        for i in range_stepped(ABSOLUTE_POS, n_words, n_units) {
            if a[i] != b[i] {
                differences += 1.0f32;
            }
            if (i < guard || i >= n_words - guard) && (a[i] != poison || b[i] != poison) {
                guards += 1.0f32;
            }
        }
        found[ABSOLUTE_POS] = differences;
        found[n_units + ABSOLUTE_POS] = guards;
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
    use crate::ops::cube::transposed;
    use crate::ops::twin::{devices, leaves};

    /// A mistake of a kernel.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Fault {
        None,
        /// One column is twice as large.
        Column,
        /// One element is three times as large.
        Element,
        /// The last element is not written.
        Unwritten,
        /// The word behind the result is written.
        Behind,
        /// The second run rounds one element otherwise.
        Unsteady,
        /// The bias is left out.
        NoBias,
        /// The sums of one row of A are wrong.
        Sums,
        /// The product takes the place of what it should be added to.
        Overwritten,
        /// The library refuses to multiply.
        Refused,
        /// There is no memory for it.
        NoMemory,
    }

    #[cube(launch)]
    fn copy(x: &[f32], y: &mut [f32], n: usize, odd: usize, factor: f32, offset: usize) {
        if ABSOLUTE_POS < n {
            if ABSOLUTE_POS == odd {
                y[offset + ABSOLUTE_POS] = x[ABSOLUTE_POS] * factor;
            } else {
                y[offset + ABSOLUTE_POS] = x[ABSOLUTE_POS];
            }
        }
    }

    /// Copies `n` elements to a target, element `odd` of them times `factor`.
    fn store(x: &CubeTensor, y: &CubeTensor, n: usize, odd: usize, factor: f32) {
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
            odd,
            factor,
            0,
        );
    }

    /// Checks a product of `a` and `b` that has been computed beforehand and is copied with a
    /// fault.
    fn verdict(a: &CubeTensor, b: &CubeTensor, beside: &Beside, fault: Fault) -> Finding {
        let [m, n] = [a.meta.shape()[0], b.meta.shape()[1]];
        let mut right = CubeBackend::float_matmul(a.clone(), b.clone());
        if let (Beside::Bias(bias), true) = (beside, fault != Fault::NoBias) {
            right = CubeBackend::float_add(right, CubeBackend::float_reshape(bias.clone(), [1, n].into()));
        }
        let right = burn_cubecl::kernel::into_contiguous(right);
        let sums = CubeBackend::float_reshape(CubeBackend::float_sum_dim(a.clone(), 1), [m].into());
        let run_number = Cell::new(0);
        check(a, b, beside, DType::F32, |target: &Target, adds: bool| {
            run_number.set(run_number.get() + 1);
            let none = 1 << 30;
            let mut out = target.out.clone();
            let sum = CubeBackend::float_mul_scalar(right.clone(), 2.0f32.into());
            let right = if adds && fault != Fault::Overwritten { &sum } else { &right };
            match fault {
                Fault::Column => {
                    let wide = Tensor::<2>::from_primitive::<CubeBackend>(right.clone());
                    let column = wide.clone().slice([0..m, 3..4]) * 2.0;
                    let wrong = wide.slice_assign([0..m, 3..4], column);
                    store(&wrong.try_into_primitive::<CubeBackend>().unwrap(), &out, m * n, none, 1.0);
                }
                Fault::Element => store(right, &out, m * n, 2 * n + 5, 3.0),
                Fault::Unwritten => store(right, &out, m * n - 1, none, 1.0),
                Fault::Unsteady if run_number.get() == 2 => store(right, &out, m * n, 7, 1.0 + 1e-6),
                Fault::Refused => return Err(NotRun::ByLibrary("no".into())),
                Fault::NoMemory => return Err(NotRun::ByDevice),
                _ => store(right, &out, m * n, none, 1.0),
            }
            if fault == Fault::Behind {
                // The guard belongs to the same memory.
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
            if let Some(to) = &target.sums {
                let factor = if fault == Fault::Sums { 1.5 } else { 1.0 };
                store(&sums, to, m, 4, factor);
            }
            Ok(())
        })
    }

    /// Every planted fault is noticed, in plain and in transposed factors.
    #[test]
    fn no_wrong_product_passes() {
        for device in devices() {
            let x = leaves(&device, &[[37, 80]], 1).remove(0).inner();
            if !is_cube(&x) {
                continue;
            }
            let primitive = |x: Tensor<2>| x.try_into_primitive::<CubeBackend>().unwrap();
            let a = primitive(x);
            let b = primitive(leaves(&device, &[[80, 24]], 2).remove(0).inner());
            let bt = primitive(leaves(&device, &[[24, 80]], 3).remove(0).inner());
            let bias = primitive(leaves(&device, &[[1, 24]], 4).remove(0).inner());
            let bias = CubeBackend::float_reshape(bias, [24].into());
            for b in [b, transposed(bt)] {
                let verdict = |beside: Beside, fault| verdict(&a, &b, &beside, fault);
                let plain = |fault| verdict(Beside::None, fault);
                for beside in [Beside::None, Beside::Bias(bias.clone()), Beside::Sums { into: None }] {
                    let right = verdict(beside, Fault::None);
                    assert!(matches!(right, Finding::Right(worst) if worst < 1.0), "{right:?}");
                }
                let wrong = [
                    (plain(Fault::Column), "is wrong"),
                    (plain(Fault::Element), "is wrong"),
                    (plain(Fault::Unwritten), "is wrong"),
                    (plain(Fault::Behind), "before or behind"),
                    (plain(Fault::Unsteady), "between two runs"),
                    (plain(Fault::Overwritten), "added to itself"),
                    (plain(Fault::Refused), "no"),
                    (verdict(Beside::Bias(bias.clone()), Fault::NoBias), "is wrong"),
                    (verdict(Beside::Sums { into: None }, Fault::Sums), "sum over K of row 4"),
                ];
                // Of what was not computed nothing is known.
                assert_eq!(plain(Fault::NoMemory), Finding::Nothing);
                for (verdict, what) in wrong {
                    assert!(
                        matches!(&verdict, Finding::Wrong(found) if found.contains(what)),
                        "{what}: {verdict:?}"
                    );
                }
            }
        }
    }

    /// From zeros nothing can be told, in batches neither.
    #[test]
    fn products_of_zeros_tell_nothing() {
        for device in devices() {
            let zeros = |shape: [usize; 3]| Tensor::<3>::zeros(shape, &device);
            if !is_cube(&zeros([1, 1, 1])) {
                continue;
            }
            let primitive = |x: Tensor<3>| x.try_into_primitive::<CubeBackend>().unwrap();
            let a = primitive(zeros([3, 5, 8]));
            let b = primitive(zeros([3, 8, 6]));
            let run = |target: &Target, _: bool| {
                let zeros = primitive(zeros([3, 5, 6]));
                store(&zeros, &target.out, 90, 1 << 30, 1.0);
                Ok(())
            };
            assert_eq!(check(&a, &b, &Beside::None, DType::F32, &run), Finding::Nothing);
        }
    }

    /// A factor that is not finite is no fault of the product; a result that is not, of factors
    /// that are, is one.
    #[test]
    fn only_the_product_is_judged() {
        let judged = |sum: f32, right: f32, allowed: f32| {
            let errors = Errors::of(&[1.0, sum], &[1.0, right], &[1.0, allowed]);
            (errors.wrong, errors.says_nothing)
        };
        assert_eq!(judged(2.0, 2.5, 1.0), (None, false));
        assert_eq!(judged(2.0, 3.5, 1.0), (Some(1), false));
        assert_eq!(judged(f32::NAN, 2.0, 1.0), (Some(1), false));
        assert_eq!(judged(f32::NAN, 2.0, f32::NAN), (Some(1), false));
        assert_eq!(judged(f32::NAN, f32::NAN, f32::NAN), (None, false));
        assert_eq!(judged(f32::INFINITY, f32::INFINITY, 1.0), (None, false));
        // Squares of numbers this small are zero.
        assert_eq!(judged(1e-30, 1.001e-30, 0.0), (None, false));
        let nothing = Errors::of(&[f32::NAN, 0.0], &[f32::NAN, 0.0], &[f32::NAN, 1.0]);
        assert!(nothing.says_nothing && nothing.wrong.is_none());
    }

    /// Batches of matrices, of which one product is wrong.
    #[test]
    fn batches_are_checked() {
        for device in devices() {
            let a = leaves(&device, &[[4, 12, 16]], 1).remove(0).inner();
            let b = leaves(&device, &[[4, 16, 20]], 2).remove(0).inner();
            if !is_cube(&a) {
                continue;
            }
            let right = burn_cubecl::kernel::into_contiguous(
                a.clone().matmul(b.clone()).try_into_primitive::<CubeBackend>().unwrap(),
            );
            let primitive = |x: Tensor<3>| x.try_into_primitive::<CubeBackend>().unwrap();
            let a = primitive(a);
            let b = primitive(b);
            for (factor, is_right) in [(1.0, true), (3.0, false)] {
                let twice = CubeBackend::float_mul_scalar(right.clone(), 2.0f32.into());
                let verdict = check(&a, &b, &Beside::None, DType::F32, |target: &Target, adds: bool| {
                    store(if adds { &twice } else { &right }, &target.out, 960, 2 * 240 + 17, factor);
                    Ok(())
                });
                assert_eq!(matches!(verdict, Finding::Right(_)), is_right, "{verdict:?}");
            }
        }
    }
}
