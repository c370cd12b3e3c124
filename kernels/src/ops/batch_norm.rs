//! Batch normalization in two halves, between which sums are reduced over the batch (Ioffe and
//! Szegedy 2015).
//!
//! ```text
//! n, s, q = rows, Σ_rows (x - μ), Σ_rows (x - μ)²       gx = gs + 2 (x - μ) · gq        μ some guess at the mean
//! y  = act(a · (x - μ - m) + β + skip)                  g' = g where y > 0, if act is the rectifier
//! gx = a · g'     gm = -a · Σ_rows g'     ga = Σ_rows g' · (x - μ - m)     gβ = Σ_rows g'     gskip = g'
//! ```
//!
//! x, y, skip `[B, N, C]`, the others `[C]`. The mean's distance m from the guess and the factor a
//! = γ / √(var + ε) come from the totals of n, s and q: `networks::batch_norm`. Subtracting the
//! guess first preserves the precision of features that are far from zero. x, y, skip and their
//! gradients may be bf16; all else is f32.

use std::marker::PhantomData;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, Tensor};
use half::bf16;
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cast::cast;
use super::cpu::{contiguous, dims, elements, elements_mut, flex_dtype, like, owned, slice, tensor};
use super::in_f32;
use super::link::Link;
use super::number::Number;
use super::relu;

/// Rows whose sums are in f32 before they are added to totals in f64.
const BLOCK: usize = 64;

/// Returns `x`, and the sums `[1 + 2C]` of `x` of `[B, N, C]` around `guess` of `[C]`: n, s, q. The
/// argument may have no other use than the returned `x`, whose gradient and that of the sums are
/// added in one pass.
pub fn moments(x: Tensor<3>, guess: Tensor<1>) -> (Tensor<3>, Tensor<1>) {
    match flex_dtype(&x) {
        Some(DType::F32) => moments_on_flex::<f32>(x, guess),
        Some(DType::BF16) => moments_on_flex::<bf16>(x, guess),
        _ => {
            let sums = plain_moments(x.clone(), guess);
            (x, sums)
        }
    }
}

fn moments_on_flex<T: Number>(x: Tensor<3>, guess: Tensor<1>) -> (Tensor<3>, Tensor<1>) {
    let link = Link::default();
    let kernel = Moments::<T> { link: link.clone(), numbers: PhantomData };
    let sums: Tensor<1> = run(kernel, [x.clone().into(), guess.into()]);
    if !x.is_autodiff() {
        return (x, sums);
    }
    // Depends on the sums, so that its backward pass runs before theirs.
    let passed = run(Pass { link }, [x.into(), sums.clone().into()]);
    (passed, sums)
}

/// Computes in f32 at least.
fn plain_moments(x: Tensor<3>, guess: Tensor<1>) -> Tensor<1> {
    let [b, n, c] = x.dims();
    let x = in_f32(x);
    let count = Tensor::<1>::full([1], (b * n) as f32, &x.device().inner()).cast(x.dtype());
    let count = if x.is_autodiff() { count.autodiff() } else { count };
    let x = x.reshape([b * n, c]) - guess.unsqueeze();
    let columns = |x: Tensor<2>| x.sum_dim(0).reshape([c]);
    Tensor::cat(vec![count, columns(x.clone()), columns(x.clone() * x)], 0)
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

/// Returns `a · (x - μ - m) + β + skip` for `x` and `skip` of `[B, N, C]`, of one type, rectified
/// if `rectify` is set.
pub fn normalize(x: Tensor<3>, affine: Affine, skip: Option<Tensor<3>>, rectify: bool) -> Tensor<3> {
    match flex_dtype(&x) {
        Some(DType::F32) => normalize_on_flex::<f32>(x, affine, skip, rectify),
        Some(DType::BF16) => normalize_on_flex::<bf16>(x, affine, skip, rectify),
        _ => plain_normalize(x, affine, skip, rectify),
    }
}

fn normalize_on_flex<T: Number>(
    x: Tensor<3>,
    affine: Affine,
    skip: Option<Tensor<3>>,
    rectify: bool,
) -> Tensor<3> {
    let Affine { guess, mean, scale, shift } = affine;
    let kernel = Normalize::<T> { rectify, numbers: PhantomData };
    let five = [x.into(), guess.into(), mean.into(), scale.into(), shift.into()];
    match skip {
        None => run(kernel, five),
        Some(skip) => {
            let [x, guess, mean, scale, shift] = five;
            run(kernel, [x, guess, mean, scale, shift, skip.into()])
        }
    }
}

/// Computes in f32 at least.
fn plain_normalize(x: Tensor<3>, affine: Affine, skip: Option<Tensor<3>>, rectify: bool) -> Tensor<3> {
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
        let [b, n, c]: [usize; 3] = dims(&x);
        let x = contiguous(&x);
        let guess = contiguous(&guess);
        let mut totals = vec![0.0f64; 2 * c];
        for rows in elements::<T>(&x).chunks(BLOCK * c) {
            let mut sums = vec![0.0; 2 * c];
            add_moments(rows, slice(&guess), &mut sums);
            totals.iter_mut().zip(sums).for_each(|(total, sum)| *total += f64::from(sum));
        }
        let mut sums = vec![(b * n) as f32];
        sums.extend(totals.into_iter().map(|total| total as f32));
        (tensor(sums, [1 + 2 * c]), (x, guess))
    }

    fn backward(
        &self,
        (x, guess): Self::Saved,
        grad: FlexTensor,
        wanted: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        let shape @ [_, _, c]: [usize; 3] = dims(&x);
        let grad = contiguous(&grad);
        let passed = match self.link.take() {
            Some(passed) => owned(passed),
            None => tensor(vec![T::default(); shape.iter().product()], shape),
        };
        let gx = wanted[0].then(|| {
            let mut gx = passed;
            let (gs, gq) = slice(&grad)[1..].split_at(c);
            add_moment_gradients(elements_mut::<T>(&mut gx), elements(&x), slice(&guess), gs, gq);
            gx
        });
        // The guess is a running mean, which has no gradient.
        [gx, None]
    }
}

/// Passes `x` through, and leaves its gradient for the backward pass of the sums.
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
        self.link.leave(grad);
        [None, None]
    }
}

/// Kernel for features with elements of type `T`.
#[derive(Debug, Clone)]
struct Normalize<T> {
    rectify: bool,
    numbers: PhantomData<T>,
}

/// Input, guess, mean, factor, and the output if it was rectified.
#[derive(Debug, Clone)]
struct Normalized {
    x: FlexTensor,
    guess: FlexTensor,
    mean: FlexTensor,
    scale: FlexTensor,
    rectified: Option<FlexTensor>,
}

/// Gradients with respect to the input, guess, mean, factor, shift and skip connection.
type NormalizeGradients = [Option<FlexTensor>; 6];

impl<T: Number> Normalize<T> {
    fn of(
        &self,
        [x, guess, mean, scale, shift]: [FlexTensor; 5],
        skip: Option<FlexTensor>,
    ) -> (FlexTensor, Normalized) {
        let shape: [usize; 3] = dims(&x);
        let [x, guess, mean, scale, shift] = [x, guess, mean, scale, shift].map(|tensor| contiguous(&tensor));
        let channels = [&guess, &mean, &scale, &shift].map(slice);
        let skip = skip.as_ref().map(contiguous);
        let values = elements::<T>(&x);
        let skip = skip.as_ref().map(elements::<T>);
        let mut y = vec![T::default(); values.len()];
        affine_rows(values, channels, skip, self.rectify, &mut y);
        let y = tensor(y, shape);
        let rectified = self.rectify.then(|| y.clone());
        (y, Normalized { x, guess, mean, scale, rectified })
    }

    fn gradients(saved: Normalized, grad: FlexTensor, wants_skip: bool) -> NormalizeGradients {
        let Normalized { x, guess, mean, scale, rectified } = saved;
        let [_, _, c]: [usize; 3] = dims(&x);
        let mut gx = owned(grad);
        let mut around: Vec<T> = Vec::with_capacity(if wants_skip { elements::<T>(&x).len() } else { 0 });
        let channels = [&guess, &mean, &scale].map(slice);
        let mut totals = vec![0.0f64; 2 * c];
        let values = elements::<T>(&x);
        let y = rectified.as_ref().map(elements::<T>);
        // Block by block, so that the rows that one loop reads are in cache for the next.
        for (number, rows) in elements_mut::<T>(&mut gx).chunks_mut(BLOCK * c).enumerate() {
            let range = number * BLOCK * c..number * BLOCK * c + rows.len();
            if let Some(y) = y {
                relu::mask(rows, &y[range.clone()]);
            }
            if wants_skip {
                around.extend_from_slice(rows);
            }
            let mut sums = vec![0.0; 2 * c];
            affine_gradients(rows, &values[range], channels, &mut sums);
            totals.iter_mut().zip(sums).for_each(|(total, sum)| *total += f64::from(sum));
        }
        let skip = wants_skip.then(|| like(&gx, around));
        let (of_scale, of_shift) = totals.split_at(c);
        let of_mean =
            of_shift.iter().zip(slice(&scale)).map(|(sum, scale)| (-sum * f64::from(*scale)) as f32);
        let narrow = |sums: &[f64]| tensor(sums.iter().map(|sum| *sum as f32).collect(), [c]);
        let of_mean = tensor(of_mean.collect(), [c]);
        [Some(gx), None, Some(of_mean), Some(narrow(of_scale)), Some(narrow(of_shift)), skip]
    }
}

impl<T: Number> Kernel<Flex, 5> for Normalize<T> {
    type Saved = Normalized;

    fn forward(&self, inputs: [FlexTensor; 5]) -> (FlexTensor, Normalized) {
        self.of(inputs, None)
    }

    fn backward(&self, saved: Normalized, grad: FlexTensor, _: [bool; 5]) -> [Option<FlexTensor>; 5] {
        let [x, guess, mean, scale, shift, _] = Self::gradients(saved, grad, false);
        [x, guess, mean, scale, shift]
    }
}

impl<T: Number> Kernel<Flex, 6> for Normalize<T> {
    type Saved = Normalized;

    fn forward(&self, [x, guess, mean, scale, shift, skip]: [FlexTensor; 6]) -> (FlexTensor, Normalized) {
        self.of([x, guess, mean, scale, shift], Some(skip))
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
            let off = x.wide() - guess;
            *s += off;
            *q += off * off;
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

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn affine_rows<T: Number>(x: &[T], channels: [&[f32]; 4], skip: Option<&[T]>, rectify: bool, y: &mut [T]) {
    match (skip, rectify) {
        (Some(skip), true) => finished_rows(x, channels, skip, y, |y, skip| relu::rectified(y + skip)),
        (Some(skip), false) => finished_rows(x, channels, skip, y, |y, skip| y + skip),
        (None, true) => finished_rows(x, channels, x, y, |y, _| relu::rectified(y)),
        (None, false) => finished_rows(x, channels, x, y, |y, _| y),
    }
}

/// Computes `finish(a · (x - μ - m) + β, skip)`, element by element. Without a skip connection,
/// callers pass `x` again and ignore it.
#[inline(always)]
fn finished_rows<T: Number>(
    x: &[T],
    [guess, mean, scale, shift]: [&[f32]; 4],
    skip: &[T],
    y: &mut [T],
    finish: impl Fn(f32, f32) -> f32,
) {
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
fn affine_gradients<T: Number>(grad: &mut [T], x: &[T], [guess, mean, scale]: [&[f32]; 3], sums: &mut [f32]) {
    let c = mean.len();
    let (of_scale, of_shift) = sums.split_at_mut(c);
    for (grad, x) in grad.chunks_exact_mut(c).zip(x.chunks_exact(c)) {
        let off = x.iter().zip(guess).zip(mean).map(|((x, guess), mean)| x.wide() - guess - mean);
        let sums = of_scale.iter_mut().zip(of_shift.iter_mut());
        for (((grad, off), scale), (of_scale, of_shift)) in grad.iter_mut().zip(off).zip(scale).zip(sums) {
            let g = grad.wide();
            *of_scale += g * off;
            *of_shift += g;
            *grad = T::nearest(g * scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::Device;

    use super::*;
    use crate::ops::twin::{assert_close, devices, leaves, types};

    /// Few rows, and more than a block.
    #[test]
    fn they_equal_their_twins_forwards_and_backwards() {
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
        let gradient = |(y, sums): (Tensor<3>, Tensor<1>)| {
            let loss = in_f32(y.clone() * y.inner().autodiff()).sum() + (sums * weights.clone()).sum();
            x.grad(&loss.backward()).expect("leaf")
        };
        let given = moments(cast(x.clone(), dtype), guess.clone());
        let features = cast(x.clone(), dtype);
        let twin = (features.clone(), plain_moments(features, guess.clone()));
        assert_eq!((given.0.dtype(), given.1.dtype()), (dtype, DType::F32));
        assert_close("sums", given.1.clone().inner(), twin.1.clone().inner(), 2e-6);
        assert_close("input", gradient(given), gradient(twin), tolerance);
    }

    fn check_normalize(device: &Device, shape: [usize; 3], dtype: DType, tolerance: f32) {
        let both = leaves(device, &[shape, shape], 1);
        let affine = leaves(device, &[[shape[2]]; 3], 2);
        let guess = leaves(device, &[[shape[2]]], 3).remove(0).inner().autodiff();
        for (with_skip, rectify) in [(false, false), (false, true), (true, false), (true, true)] {
            let run = |f: fn(Tensor<3>, Affine, Option<Tensor<3>>, bool) -> Tensor<3>| {
                let [mean, scale, shift] = [0, 1, 2].map(|i| affine[i].clone());
                let skip = with_skip.then(|| cast(both[1].clone(), dtype));
                f(
                    cast(both[0].clone(), dtype),
                    Affine { guess: guess.clone(), mean, scale, shift },
                    skip,
                    rectify,
                )
            };
            let y = run(normalize);
            let twin = run(plain_normalize);
            assert_eq!(y.dtype(), dtype);
            assert_close("forward", y.clone().inner(), twin.clone().inner(), tolerance);
            let gradients = |y: Tensor<3>| {
                let grads = (y.clone() * y.inner().autodiff()).sum().backward();
                let maps: Vec<_> =
                    both.iter().take(1 + usize::from(with_skip)).map(|x| x.grad(&grads)).collect();
                let vectors: Vec<_> = affine.iter().map(|x| x.grad(&grads).expect("leaf")).collect();
                (maps, vectors)
            };
            let a = gradients(y);
            let t = gradients(twin);
            for (a, t) in a.0.into_iter().zip(t.0) {
                assert_close("map", a.expect("leaf"), t.expect("leaf"), tolerance);
            }
            for (a, t) in a.1.into_iter().zip(t.1) {
                assert_close("vector", a, t, tolerance);
            }
        }
    }
}
