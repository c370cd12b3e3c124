//! A residual branch: a layer norm at its start, and the addition to the skip connection at its
//! end.
//!
//! ```text
//! h = norm(x)      y = x + f ⊙ γ ⊙ b(h)      x, h, b, y [.., D]   f by sequence   γ [D]   ones if absent
//! gb = f ⊙ γ ⊙ g   gγ = Σ_rows f ⊙ g ⊙ b     gx = g + gradient of norm(x), given gh
//! ```
//!
//! On CPUs and GPUs the end stores `g` for the backward pass of the branch's first operation, which
//! runs later and adds it in its own loop: the gradient of `x` takes one pass over memory instead
//! of two, and autodiff adds nothing. On a GPU, the end of a branch and the norm of the next one are
//! one operation.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, Tensor};
use half::bf16;
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cast::cast;
use super::cpu::{
    add, contiguous, elements, is_flex, like, owned, rows_and_length, slice, slice_mut, tensor,
};
#[cfg(feature = "cube")]
use super::cube;
use super::kept::SequenceFactors;
use super::layer_norm::{self, layer_norm};
use super::lengths::Lengths;
use super::link::Link;
use super::math::over_rows;
use super::number::{Number, nearest};

/// The skip connection of a branch.
pub struct Skip<const D: usize> {
    x: Tensor<D>,
    end: End,
}

/// The way in which the gradient of the skip connection is added to the gradient of the branch.
enum End {
    /// The end stores it for the branch's first operation, on a CPU.
    Cpu(Link<FlexTensor>),
    /// The end stores it for the branch's first operation, on a GPU.
    #[cfg(feature = "cube")]
    Gpu(Link<burn_cubecl::tensor::CubeTensor>),
    /// Autodiff adds it.
    Autodiff,
}

/// The layer norm at the start of a branch.
pub struct BranchNorm {
    /// Gain, `[D]`.
    pub gamma: Tensor<1>,
    /// Bias, `[D]`.
    pub beta: Tensor<1>,
    /// Keeps the variance away from zero.
    pub epsilon: f64,
    /// Type of the matrix products in the branch. On a GPU, the normalized values are written in
    /// it.
    pub products: DType,
}

impl BranchNorm {
    /// Returns the norm on a GPU, whose backward pass adds the gradient in `link`.
    #[cfg(feature = "cube")]
    fn on_gpu(&self, link: Link<burn_cubecl::tensor::CubeTensor>) -> cube::LayerNorm {
        cube::LayerNorm { epsilon: self.epsilon as f32, output: self.products, link: Some(link) }
    }
}

/// Starts a branch: returns the normalized `x` of `[.., D]`, and the skip connection.
pub fn branch<const D: usize>(x: Tensor<D>, norm: BranchNorm) -> (Tensor<D>, Skip<D>) {
    #[cfg(feature = "cube")]
    if cube::is_cube(&x) {
        let link = Link::default();
        let skip = Skip { x: x.clone().inner_or_self(), end: End::Gpu(link.clone()) };
        return (run(norm.on_gpu(link), [x.into(), norm.gamma.into(), norm.beta.into()]), skip);
    }
    let BranchNorm { gamma, beta, epsilon, .. } = norm;
    if !is_flex(&x) {
        return (layer_norm(x.clone(), gamma, beta, epsilon), Skip::new(x, None));
    }
    let link = Link::default();
    let skip = Skip::new(x.clone(), Some(link.clone()));
    (layer_norm::with_link(x, gamma, beta, epsilon, link), skip)
}

impl<const D: usize> Skip<D> {
    /// Creates the skip connection around a branch that starts with `x`. With a `link`, the
    /// branch's first operation adds the gradient stored in it.
    pub(super) fn new(x: Tensor<D>, link: Option<Link<FlexTensor>>) -> Self {
        match link {
            Some(link) => Self { x: x.inner_or_self(), end: End::Cpu(link) },
            None => Self { x, end: End::Autodiff },
        }
    }

    /// Ends the branch with its output `b` of `[.., D]`, which may be bf16. `gamma` scales channels
    /// (LayerScale); `factors` scale the rows of each sequence.
    pub fn join(
        self,
        b: Tensor<D>,
        gamma: Option<Tensor<1>>,
        factors: Option<SequenceFactors<'_>>,
    ) -> Tensor<D> {
        let dtype = self.x.dtype();
        let link = match self.end {
            End::Cpu(link) => link,
            #[cfg(feature = "cube")]
            End::Gpu(link) => return cube::join(self.x, b, gamma, factors, link),
            End::Autodiff => return plain(self.x, cast(b, dtype), gamma, factors),
        };
        let join = Join { factors: factors.map(RowFactors::new), link };
        match (gamma, b.dtype()) {
            // The output is kept in bf16.
            (Some(gamma), DType::BF16) => {
                run(ScaledJoin::<bf16>::new(join), [self.x.into(), b.into(), gamma.into()])
            }
            (Some(gamma), _) => run(ScaledJoin::<f32>::new(join), [self.x.into(), b.into(), gamma.into()]),
            (None, _) => run(join, [self.x.into(), cast(b, dtype).into()]),
        }
    }

    /// Ends the branch as [`Self::join`] does, and starts the next one with `norm` as [`branch`]
    /// does.
    pub fn join_and_branch(
        self,
        b: Tensor<D>,
        gamma: Option<Tensor<1>>,
        factors: Option<SequenceFactors<'_>>,
        norm: BranchNorm,
    ) -> (Tensor<D>, Skip<D>) {
        #[cfg(feature = "cube")]
        if let End::Gpu(link) = self.end {
            let join = cube::Join::new(factors, &self.x.device(), link);
            let next = Link::default();
            let kernel = norm.on_gpu(next.clone());
            let (h, y) = cube::join_norm(join, kernel, [self.x, b], gamma, [norm.gamma, norm.beta]);
            return (h, Skip { x: y, end: End::Gpu(next) });
        }
        branch(self.join(b, gamma, factors), norm)
    }
}

fn plain<const D: usize>(
    x: Tensor<D>,
    b: Tensor<D>,
    gamma: Option<Tensor<1>>,
    factors: Option<SequenceFactors<'_>>,
) -> Tensor<D> {
    let b = match gamma {
        Some(gamma) => b * gamma.unsqueeze(),
        None => b,
    };
    let Some(factors) = factors else { return x + b };
    let factors = Tensor::<1>::from_floats(&factors.by_token()[..], &b.device().inner());
    let mut shape = b.dims();
    shape[D - 1] = 1;
    let factors = factors.reshape(shape).cast(b.dtype());
    if b.is_autodiff() { x + b * factors.autodiff() } else { x + b * factors }
}

/// Access to a tensor without its autodiff graph, if it has one.
trait InnerOrSelf {
    fn inner_or_self(self) -> Self;
}

impl<const D: usize> InnerOrSelf for Tensor<D> {
    fn inner_or_self(self) -> Self {
        if self.is_autodiff() { self.inner() } else { self }
    }
}

#[derive(Debug, Clone)]
struct Join {
    factors: Option<RowFactors>,
    link: Link<FlexTensor>,
}

/// Factors of the rows of sequences.
#[derive(Debug, Clone)]
struct RowFactors {
    /// Factors, one for each sequence.
    factors: Arc<[f32]>,
    lengths: Lengths,
}

impl RowFactors {
    fn new(factors: SequenceFactors<'_>) -> Self {
        Self { factors: factors.factors.into(), lengths: factors.lengths.clone() }
    }

    /// Calls `f` with each range of consecutive rows among the rows `rows` that has one factor,
    /// counted from the first of `rows`, and with the factor.
    fn for_each_range(&self, rows: Range<usize>, mut f: impl FnMut(Range<usize>, f32)) {
        for (sequence, range) in self.factors.iter().zip(self.lengths.ranges()) {
            let start = range.start.max(rows.start);
            let end = range.end.min(rows.end);
            if start < end {
                f(start - rows.start..end - rows.start, *sequence);
            }
        }
    }
}

impl Join {
    /// Calls `f` with each range of consecutive rows among the rows `rows` that has one factor,
    /// counted from the first of `rows`, and with the factor: 1 for all rows if there are none.
    fn for_each_range(&self, rows: Range<usize>, mut f: impl FnMut(Range<usize>, f32)) {
        match &self.factors {
            Some(factors) => factors.for_each_range(rows, f),
            None => f(0..rows.len(), 1.0),
        }
    }

    /// Returns `into` after `join(factor, into, other)` was called for the rows of every factor.
    fn join_rows<T: Number>(
        &self,
        into: FlexTensor,
        other: &FlexTensor,
        join: impl Fn(f32, &mut [f32], &[T]) + Sync,
    ) -> FlexTensor {
        let (_, d) = rows_and_length(&into);
        let mut sum = owned(into);
        let other = contiguous(other);
        let other = elements(&other);
        over_rows(slice_mut(&mut sum), d, |first, rows| {
            let other = &other[first * d..][..rows.len()];
            self.for_each_range(first..first + rows.len() / d, |range, factor| {
                let range = range.start * d..range.end * d;
                join(factor, &mut rows[range.clone()], &other[range]);
            });
        });
        sum
    }
}

impl Kernel<Flex, 2> for Join {
    type Saved = ();

    fn forward(&self, [x, b]: [FlexTensor; 2]) -> (FlexTensor, ()) {
        // No other tensor shares the branch's output, so the sum can overwrite it.
        let y = match &self.factors {
            Some(_) => self.join_rows(b, &x, |factor, b, x: &[f32]| scale_and_add(b, x, factor)),
            None => self.join_rows(b, &x, |_, b, x: &[f32]| add(b, x)),
        };
        (y, ())
    }

    fn backward(&self, (): (), grad: FlexTensor, wanted: [bool; 2]) -> [Option<FlexTensor>; 2] {
        let gb = wanted[1].then(|| match &self.factors {
            Some(factors) => scale_rows(&grad, factors),
            None => grad.clone(),
        });
        // The gradient of the skip connection is `grad` itself; the link passes it on.
        self.link.store(grad);
        [None, gb]
    }
}

/// The end of a branch whose output has elements of type `T` and is scaled by channel.
#[derive(Debug, Clone)]
struct ScaledJoin<T> {
    join: Join,
    numbers: PhantomData<T>,
}

impl<T> ScaledJoin<T> {
    fn new(join: Join) -> Self {
        Self { join, numbers: PhantomData }
    }
}

impl<T: Number> Kernel<Flex, 3> for ScaledJoin<T> {
    /// The branch's output, and γ.
    type Saved = [FlexTensor; 2];

    fn forward(&self, [x, b, gamma]: [FlexTensor; 3]) -> (FlexTensor, Self::Saved) {
        let gamma = contiguous(&gamma);
        let channels = slice(&gamma);
        let y = self.join.join_rows(x, &b, |factor, y, b: &[T]| add_channels(y, b, channels, factor));
        (y, [contiguous(&b), gamma])
    }

    fn backward(
        &self,
        [b, gamma]: Self::Saved,
        grad: FlexTensor,
        wanted: [bool; 3],
    ) -> [Option<FlexTensor>; 3] {
        let (n_rows, d) = rows_and_length(&grad);
        let contiguous_grad = contiguous(&grad);
        let g = slice(&contiguous_grad);
        let b = elements::<T>(&b);
        let gamma = slice(&gamma);
        let gb = wanted[1].then(|| {
            let mut out = vec![0.0; n_rows * d];
            over_rows(&mut out, d, |first, rows| {
                let g = &g[first * d..][..rows.len()];
                self.join.for_each_range(first..first + rows.len() / d, |range, factor| {
                    let range = range.start * d..range.end * d;
                    add_channels(&mut rows[range.clone()], &g[range], gamma, factor);
                });
            });
            like(&contiguous_grad, nearest::<T>(out))
        });
        let ggamma = wanted[2].then(|| {
            let mut sums = vec![0.0; d];
            self.join.for_each_range(0..n_rows, |range, factor| {
                let range = range.start * d..range.end * d;
                add_products(&mut sums, &g[range.clone()], &b[range], factor);
            });
            tensor(sums, [d])
        });
        // The gradient of the skip connection is `grad` itself; the link passes it on.
        self.join.link.store(grad);
        [None, gb, ggamma]
    }
}

/// Returns the gradient with the rows of each sequence multiplied by its factor.
fn scale_rows(grad: &FlexTensor, factors: &RowFactors) -> FlexTensor {
    let (_, d) = rows_and_length(grad);
    let mut out = owned(grad.clone());
    over_rows(slice_mut(&mut out), d, |first, rows| {
        factors.for_each_range(first..first + rows.len() / d, |range, factor| {
            scale(&mut rows[range.start * d..range.end * d], factor);
        });
    });
    out
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn scale_and_add(b: &mut [f32], x: &[f32], factor: f32) {
    for (b, x) in b.iter_mut().zip(x) {
        *b = x + *b * factor;
    }
}

/// Computes `y += factor · γ ⊙ b`, row by row.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_channels<T: Number>(y: &mut [f32], b: &[T], gamma: &[f32], factor: f32) {
    for (y, b) in y.chunks_exact_mut(gamma.len()).zip(b.chunks_exact(gamma.len())) {
        for ((y, b), gamma) in y.iter_mut().zip(b).zip(gamma) {
            *y += b.wide() * gamma * factor;
        }
    }
}

/// Computes `sums += factor · Σ_rows g ⊙ b`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_products<T: Number>(sums: &mut [f32], g: &[f32], b: &[T], factor: f32) {
    for (g, b) in g.chunks_exact(sums.len()).zip(b.chunks_exact(sums.len())) {
        for ((sum, g), b) in sums.iter_mut().zip(g).zip(b) {
            *sum += g * b.wide() * factor;
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn scale(values: &mut [f32], factor: f32) {
    for value in values {
        *value *= factor;
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::Device;

    use super::*;
    use crate::ops::gelu;
    use crate::ops::lengths::Run;
    use crate::ops::testing::{assert_close, assert_gradients_close, backward, devices, leaves};

    fn norm_of(weights: &[Tensor<1>]) -> BranchNorm {
        BranchNorm {
            gamma: weights[0].clone(),
            beta: weights[1].clone(),
            epsilon: 1e-6,
            products: DType::F32,
        }
    }

    /// Three branches in sequence, with and without dropped sequences and LayerScale. The first two
    /// are joined by one operation.
    #[test]
    fn branches_match_plain_forward_and_backward() {
        for device in devices() {
            for has_factors in [false, true] {
                check(&device, 37, has_factors, false, DType::F32);
                check(&device, 64, has_factors, true, DType::F32);
                if device.supports_dtype(DType::BF16) {
                    check(&device, 64, has_factors, true, DType::BF16);
                }
            }
        }
    }

    /// Compares branches whose outputs have type `dtype` with their composition of plain
    /// operations.
    fn check(device: &Device, d: usize, has_factors: bool, scaled: bool, dtype: DType) {
        let lengths = Lengths::new([Run { n_sequences: 3, length: 33 }, Run { n_sequences: 2, length: 5 }]);
        let factors = &[0.0, 1.25, 1.25, 0.0, 2.0];
        let factors = has_factors.then_some(SequenceFactors { factors, lengths: &lengths });
        let x = leaves(device, &[[lengths.n_tokens(), d]], 1).remove(0);
        let weights = leaves(device, &[[d], [d], [d]], 2);
        let gamma = scaled.then(|| weights[2].clone());
        let (first, skip) = branch(x.clone(), norm_of(&weights));
        let (second, skip) =
            skip.join_and_branch(cast(gelu(first), dtype), gamma.clone(), factors, norm_of(&weights));
        let y = skip.join(cast(gelu(second), dtype), gamma.clone(), factors);
        let (third, skip) = branch(y, norm_of(&weights));
        let y = skip.join(cast(gelu(third), dtype), gamma.clone(), factors);
        let mut expected = x.clone();
        for _ in 0..3 {
            let h = layer_norm(expected.clone(), weights[0].clone(), weights[1].clone(), 1e-6);
            let b = cast(cast(gelu(h), dtype), DType::F32);
            expected = plain(expected, b, gamma.clone(), factors);
        }
        assert_close("forward", y.clone().inner(), expected.clone().inner(), 1e-6);
        let grads = backward(y);
        let expected = backward(expected);
        assert_gradients_close("input", &x, &grads, &expected, 3e-6);
        assert_gradients_close("norm", &weights[0], &grads, &expected, 3e-6);
        assert_gradients_close("bias of the norm", &weights[1], &grads, &expected, 3e-6);
        if scaled {
            assert_gradients_close("scale", &weights[2], &grads, &expected, 3e-6);
        }
    }
}
