//! Batch normalization in two halves, between which sums are reduced over the batch (Ioffe and
//! Szegedy 2015).
//!
//! ```text
//! n, s, q = rows, Σ_rows (x - μ), Σ_rows (x - μ)²       gx = gs + 2 (x - μ) · gq
//! y  = act(a · (x - μ - m) + β + skip)                  g' = g where y > 0, if act is the ReLU
//! gx = a · g'     gm = -a · Σ_rows g'     ga = Σ_rows g' · (x - μ - m)
//! gβ = Σ_rows g'  gskip = g'
//! ```
//!
//! x, y, skip `[.., C]`, the others `[C]`. μ is a guess at the mean; subtracting it first
//! preserves the precision of features that are far from zero. The distance m of the mean from the
//! guess and the factor a = γ / √(var + ε) are computed from the totals of n, s and q in
//! `networks::batch_norm`. x, y, skip and their gradients may be bf16; everything else is f32.

use std::marker::PhantomData;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, Tensor};
use half::bf16;
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cast::cast;
use super::cpu::{
    contiguous, elements, elements_mut, flex_dtype, like, owned, rows_and_length, slice, tensor,
};
use super::in_f32;
use super::link::Link;
use super::number::Number;
use super::relu;

/// Rows that are summed in f32 before the sums are added to totals in f64.
const BLOCK: usize = 64;

/// Returns `x`, and the sums n, s and q of `x` of `[.., C]` around `guess` of `[C]`, `[1 + 2C]`.
/// The argument must have no use other than the returned `x`: the gradients of the returned `x` and
/// of the sums are added in one pass.
pub fn moments<const D: usize>(x: Tensor<D>, guess: Tensor<1>) -> (Tensor<D>, Tensor<1>) {
    match flex_dtype(&x) {
        Some(DType::F32) => moments_on_flex::<f32, D>(x, guess),
        Some(DType::BF16) => moments_on_flex::<bf16, D>(x, guess),
        _ => {
            let sums = plain_moments(x.clone(), guess);
            (x, sums)
        }
    }
}

fn moments_on_flex<T: Number, const D: usize>(x: Tensor<D>, guess: Tensor<1>) -> (Tensor<D>, Tensor<1>) {
    let link = Link::default();
    let kernel = Moments::<T> { link: link.clone(), numbers: PhantomData };
    let sums: Tensor<1> = run(kernel, [x.clone().into(), guess.into()]);
    if !x.is_autodiff() {
        return (x, sums);
    }
    // The sums are an input so that this backward pass runs before theirs.
    let x = run(Pass { link }, [x.into(), sums.clone().into()]);
    (x, sums)
}

/// Computes in f32 at least.
fn plain_moments<const D: usize>(x: Tensor<D>, guess: Tensor<1>) -> Tensor<1> {
    let [c] = guess.dims();
    let n_rows = x.dims().iter().product::<usize>() / c;
    let x = in_f32(x);
    let count = Tensor::<1>::full([1], n_rows as f32, &x.device().inner()).cast(x.dtype());
    let count = if x.is_autodiff() { count.autodiff() } else { count };
    let x = x.reshape([n_rows, c]) - guess.unsqueeze();
    let s = x.clone().sum_dim(0).reshape([c]);
    let q = (x.clone() * x).sum_dim(0).reshape([c]);
    Tensor::cat(vec![count, s, q], 0)
}

/// Parameters of a normalization, `[C]` each.
#[derive(Debug, Clone)]
pub struct Affine {
    /// Guess at the mean, μ, which is subtracted first; it has no gradient.
    pub guess: Tensor<1>,
    /// Distance of the mean from the guess, m, which is subtracted next.
    pub mean: Tensor<1>,
    /// Factor, a.
    pub scale: Tensor<1>,
    /// Shift, β.
    pub shift: Tensor<1>,
}

/// Returns `a · (x - μ - m) + β + skip` for `x` and `skip` of `[.., C]`, of one type, rectified
/// if `rectify` is set.
pub fn normalize<const D: usize>(
    x: Tensor<D>,
    affine: Affine,
    skip: Option<Tensor<D>>,
    rectify: bool,
) -> Tensor<D> {
    match flex_dtype(&x) {
        Some(DType::F32) => normalize_on_flex::<f32, D>(x, affine, skip, rectify),
        Some(DType::BF16) => normalize_on_flex::<bf16, D>(x, affine, skip, rectify),
        _ => plain_normalize(x, affine, skip, rectify),
    }
}

fn normalize_on_flex<T: Number, const D: usize>(
    x: Tensor<D>,
    affine: Affine,
    skip: Option<Tensor<D>>,
    rectify: bool,
) -> Tensor<D> {
    let Affine { guess, mean, scale, shift } = affine;
    let kernel = Normalize::<T> { rectify, numbers: PhantomData };
    match skip {
        None => run(kernel, [x.into(), guess.into(), mean.into(), scale.into(), shift.into()]),
        Some(skip) => {
            run(kernel, [x.into(), guess.into(), mean.into(), scale.into(), shift.into(), skip.into()])
        }
    }
}

/// Computes in f32 at least.
fn plain_normalize<const D: usize>(
    x: Tensor<D>,
    affine: Affine,
    skip: Option<Tensor<D>>,
    rectify: bool,
) -> Tensor<D> {
    let Affine { guess, mean, scale, shift } = affine;
    let dtype = x.dtype();
    let x = in_f32(x);
    let mut y = (x - guess.unsqueeze() - mean.unsqueeze()) * scale.unsqueeze() + shift.unsqueeze();
    if let Some(skip) = skip {
        y = y + in_f32(skip);
    }
    cast(if rectify { burn_tensor::activation::relu(y) } else { y }, dtype)
}

/// Kernel for features with elements of type `T`.
#[derive(Debug, Clone)]
struct Moments<T> {
    link: Link<FlexTensor>,
    numbers: PhantomData<T>,
}

impl<T: Number> Kernel<Flex, 2> for Moments<T> {
    type Saved = (FlexTensor, FlexTensor);

    fn forward(&self, [x, guess]: [FlexTensor; 2]) -> (FlexTensor, Self::Saved) {
        let (n_rows, c) = rows_and_length(&x);
        let x = contiguous(&x);
        let guess = contiguous(&guess);
        let mut totals = vec![0.0f64; 2 * c];
        for rows in elements::<T>(&x).chunks(BLOCK * c) {
            let mut sums = vec![0.0; 2 * c];
            add_moments(rows, slice(&guess), &mut sums);
            totals.iter_mut().zip(sums).for_each(|(total, sum)| *total += f64::from(sum));
        }
        let mut sums = vec![n_rows as f32];
        sums.extend(totals.into_iter().map(|total| total as f32));
        (tensor(sums, [1 + 2 * c]), (x, guess))
    }

    fn backward(
        &self,
        (x, guess): Self::Saved,
        grad: FlexTensor,
        wanted: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        let (n_rows, c) = rows_and_length(&x);
        let grad = contiguous(&grad);
        let passed_grad = match self.link.take() {
            Some(grad) => owned(grad),
            None => like(&x, vec![T::default(); n_rows * c]),
        };
        let gx = wanted[0].then(|| {
            let mut gx = passed_grad;
            let (gs, gq) = slice(&grad)[1..].split_at(c);
            add_moment_gradients(elements_mut::<T>(&mut gx), elements(&x), slice(&guess), gs, gq);
            gx
        });
        // The guess is a running mean, which has no gradient.
        [gx, None]
    }
}

/// Returns `x` unchanged, and stores its gradient for the backward pass of the sums.
#[derive(Debug, Clone)]
struct Pass {
    link: Link<FlexTensor>,
}

impl Kernel<Flex, 2> for Pass {
    type Saved = ();

    fn forward(&self, [x, _]: [FlexTensor; 2]) -> (FlexTensor, ()) {
        (x, ())
    }

    fn backward(&self, (): (), grad: FlexTensor, _: [bool; 2]) -> [Option<FlexTensor>; 2] {
        self.link.store(grad);
        [None, None]
    }
}

/// Kernel for features with elements of type `T`.
#[derive(Debug, Clone)]
struct Normalize<T> {
    rectify: bool,
    numbers: PhantomData<T>,
}

/// Tensors kept for the backward pass of a normalization.
#[derive(Debug, Clone)]
struct Normalized {
    x: FlexTensor,
    guess: FlexTensor,
    mean: FlexTensor,
    scale: FlexTensor,
    /// The output, if it was rectified.
    rectified: Option<FlexTensor>,
}

/// Gradients of the input, guess, mean, factor, shift and skip connection.
type NormalizeGradients = [Option<FlexTensor>; 6];

impl<T: Number> Normalize<T> {
    fn output(
        &self,
        [x, guess, mean, scale, shift]: [FlexTensor; 5],
        skip: Option<FlexTensor>,
    ) -> (FlexTensor, Normalized) {
        let [x, guess, mean, scale, shift] = [x, guess, mean, scale, shift].map(|tensor| contiguous(&tensor));
        let channels = ChannelValues {
            guess: slice(&guess),
            mean: slice(&mean),
            scale: slice(&scale),
            shift: slice(&shift),
        };
        let skip = skip.as_ref().map(contiguous);
        let values = elements::<T>(&x);
        let skip = skip.as_ref().map(elements::<T>);
        let mut y = vec![T::default(); values.len()];
        affine_rows(values, channels, skip, self.rectify, &mut y);
        let y = like(&x, y);
        let rectified = self.rectify.then(|| y.clone());
        (y, Normalized { x, guess, mean, scale, rectified })
    }

    fn gradients(saved: Normalized, grad: FlexTensor, wants_skip: bool) -> NormalizeGradients {
        let Normalized { x, guess, mean, scale, rectified } = saved;
        let (_, c) = rows_and_length(&x);
        let mut gx = owned(grad);
        let values = elements::<T>(&x);
        let mut skip_grad: Vec<T> = Vec::with_capacity(if wants_skip { values.len() } else { 0 });
        let mut totals = vec![0.0f64; 2 * c];
        let y = rectified.as_ref().map(elements::<T>);
        // Block by block, so that the rows are in the cache for every loop over them.
        for (index, rows) in elements_mut::<T>(&mut gx).chunks_mut(BLOCK * c).enumerate() {
            let range = index * BLOCK * c..index * BLOCK * c + rows.len();
            if let Some(y) = y {
                relu::mask(rows, &y[range.clone()]);
            }
            if wants_skip {
                skip_grad.extend_from_slice(rows);
            }
            let mut sums = vec![0.0; 2 * c];
            affine_gradients(rows, &values[range], slice(&guess), slice(&mean), slice(&scale), &mut sums);
            totals.iter_mut().zip(sums).for_each(|(total, sum)| *total += f64::from(sum));
        }
        let g_skip = wants_skip.then(|| like(&gx, skip_grad));
        let (scale_totals, shift_totals) = totals.split_at(c);
        let mut g_mean = Vec::with_capacity(c);
        for (total, scale) in shift_totals.iter().zip(slice(&scale)) {
            g_mean.push((-total * f64::from(*scale)) as f32);
        }
        let g_mean = tensor(g_mean, [c]);
        let g_scale = tensor(to_f32(scale_totals), [c]);
        let g_shift = tensor(to_f32(shift_totals), [c]);
        [Some(gx), None, Some(g_mean), Some(g_scale), Some(g_shift), g_skip]
    }
}

fn to_f32(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| *value as f32).collect()
}

impl<T: Number> Kernel<Flex, 5> for Normalize<T> {
    type Saved = Normalized;

    fn forward(&self, inputs: [FlexTensor; 5]) -> (FlexTensor, Normalized) {
        self.output(inputs, None)
    }

    fn backward(&self, saved: Normalized, grad: FlexTensor, _: [bool; 5]) -> [Option<FlexTensor>; 5] {
        let [x, guess, mean, scale, shift, _] = Self::gradients(saved, grad, false);
        [x, guess, mean, scale, shift]
    }
}

impl<T: Number> Kernel<Flex, 6> for Normalize<T> {
    type Saved = Normalized;

    fn forward(&self, [x, guess, mean, scale, shift, skip]: [FlexTensor; 6]) -> (FlexTensor, Normalized) {
        self.output([x, guess, mean, scale, shift], Some(skip))
    }

    fn backward(&self, saved: Normalized, grad: FlexTensor, wanted: [bool; 6]) -> NormalizeGradients {
        Self::gradients(saved, grad, wanted[5])
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_moments<T: Number>(rows: &[T], guess: &[f32], sums: &mut [f32]) {
    let (s, q) = sums.split_at_mut(guess.len());
    for row in rows.chunks_exact(guess.len()) {
        for (((x, guess), s), q) in row.iter().zip(guess).zip(s.iter_mut()).zip(q.iter_mut()) {
            let deviation = x.wide() - guess;
            *s += deviation;
            *q += deviation * deviation;
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_moment_gradients<T: Number>(gx: &mut [T], x: &[T], guess: &[f32], gs: &[f32], gq: &[f32]) {
    let c = guess.len();
    for (gx, x) in gx.chunks_exact_mut(c).zip(x.chunks_exact(c)) {
        for ((((gx, x), guess), gs), gq) in gx.iter_mut().zip(x).zip(guess).zip(gs).zip(gq) {
            *gx = T::nearest(gx.wide() + (gs + 2.0 * (x.wide() - guess) * gq));
        }
    }
}

/// The parameters of a normalization by channel, as in [`Affine`].
#[derive(Clone, Copy)]
struct ChannelValues<'a> {
    guess: &'a [f32],
    mean: &'a [f32],
    scale: &'a [f32],
    shift: &'a [f32],
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn affine_rows<T: Number>(
    x: &[T],
    channels: ChannelValues<'_>,
    skip: Option<&[T]>,
    rectify: bool,
    y: &mut [T],
) {
    match (skip, rectify) {
        (Some(skip), true) => map_affine(x, channels, skip, y, |y, skip| relu::rectified(y + skip)),
        (Some(skip), false) => map_affine(x, channels, skip, y, |y, skip| y + skip),
        (None, true) => map_affine(x, channels, x, y, |y, _| relu::rectified(y)),
        (None, false) => map_affine(x, channels, x, y, |y, _| y),
    }
}

/// Computes `finish(a · (x - μ - m) + β, skip)` for every element. Without a skip connection,
/// callers pass `x` as `skip`, and `finish` ignores it.
#[inline(always)]
fn map_affine<T: Number>(
    x: &[T],
    channels: ChannelValues<'_>,
    skip: &[T],
    y: &mut [T],
    finish: impl Fn(f32, f32) -> f32,
) {
    let ChannelValues { guess, mean, scale, shift } = channels;
    let c = mean.len();
    for ((x, skip), y) in x.chunks_exact(c).zip(skip.chunks_exact(c)).zip(y.chunks_exact_mut(c)) {
        let channels = guess.iter().zip(mean).zip(scale).zip(shift);
        for (((y, x), skip), (((guess, mean), scale), shift)) in y.iter_mut().zip(x).zip(skip).zip(channels) {
            *y = T::nearest(finish((x.wide() - guess - mean) * scale + shift, skip.wide()));
        }
    }
}

/// Adds the gradients of factor and shift to `sums`, and replaces `grad` by the input's gradient.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn affine_gradients<T: Number>(
    grad: &mut [T],
    x: &[T],
    guess: &[f32],
    mean: &[f32],
    scale: &[f32],
    sums: &mut [f32],
) {
    let c = mean.len();
    let (scale_sums, shift_sums) = sums.split_at_mut(c);
    for (grad, x) in grad.chunks_exact_mut(c).zip(x.chunks_exact(c)) {
        let deviations = x.iter().zip(guess).zip(mean).map(|((x, guess), mean)| x.wide() - guess - mean);
        let sums = scale_sums.iter_mut().zip(shift_sums.iter_mut());
        for (((grad, deviation), scale), (scale_sum, shift_sum)) in
            grad.iter_mut().zip(deviations).zip(scale).zip(sums)
        {
            let g = grad.wide();
            *scale_sum += g * deviation;
            *shift_sum += g;
            *grad = T::nearest(g * scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::Device;

    use super::*;
    use crate::ops::testing::{assert_close, assert_gradients_close, backward, devices, leaves, types};

    /// Shapes cover few rows, and more rows than a block.
    #[test]
    fn both_halves_match_plain_forward_and_backward() {
        for device in devices() {
            for shape in [[1, 1, 5], [3, 5, 37], [4, 33, 16]] {
                for (dtype, tolerance) in types(&device, 5e-6) {
                    check_moments(&device, shape, dtype, tolerance);
                    check_normalize(&device, shape, dtype, tolerance);
                }
            }
        }
    }

    fn check_moments(device: &Device, shape: [usize; 3], dtype: DType, tolerance: f32) {
        let x = leaves(device, &[shape], 1).remove(0);
        let guess = leaves(device, &[[shape[2]]], 2).remove(0).inner().autodiff();
        let weights = leaves(device, &[[1 + 2 * shape[2]]], 3).remove(0).inner().autodiff();
        let (y, sums) = moments(cast(x.clone(), dtype), guess.clone());
        let expected_y = cast(x.clone(), dtype);
        let expected_sums = plain_moments(expected_y.clone(), guess);
        assert_eq!((y.dtype(), sums.dtype()), (dtype, DType::F32));
        assert_close("sums", sums.clone().inner(), expected_sums.clone().inner(), 2e-6);
        let grads = moments_loss(y, sums * weights.clone()).backward();
        let expected = moments_loss(expected_y, expected_sums * weights).backward();
        assert_gradients_close("input", &x, &grads, &expected, tolerance);
    }

    fn moments_loss(y: Tensor<3>, weighted_sums: Tensor<1>) -> Tensor<1> {
        in_f32(y.clone() * y.inner().autodiff()).sum() + weighted_sums.sum()
    }

    fn check_normalize(device: &Device, shape: [usize; 3], dtype: DType, tolerance: f32) {
        let maps = leaves(device, &[shape, shape], 1);
        let vectors = leaves(device, &[[shape[2]]; 3], 2);
        let affine = Affine {
            guess: leaves(device, &[[shape[2]]], 3).remove(0).inner().autodiff(),
            mean: vectors[0].clone(),
            scale: vectors[1].clone(),
            shift: vectors[2].clone(),
        };
        for (with_skip, rectify) in [(false, false), (false, true), (true, false), (true, true)] {
            let skip = with_skip.then(|| cast(maps[1].clone(), dtype));
            let y = normalize(cast(maps[0].clone(), dtype), affine.clone(), skip, rectify);
            let skip = with_skip.then(|| cast(maps[1].clone(), dtype));
            let expected = plain_normalize(cast(maps[0].clone(), dtype), affine.clone(), skip, rectify);
            assert_eq!(y.dtype(), dtype);
            assert_close("forward", y.clone().inner(), expected.clone().inner(), tolerance);
            let grads = backward(y);
            let expected = backward(expected);
            for map in &maps[..1 + usize::from(with_skip)] {
                assert_gradients_close("map", map, &grads, &expected, tolerance);
            }
            for vector in &vectors {
                assert_gradients_close("vector", vector, &grads, &expected, tolerance);
            }
        }
    }
}
