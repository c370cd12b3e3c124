//! The end of a residual branch in one pass in each direction.
//!
//! ```text
//! y  = x + f ⊙ γ ⊙ b         x, y [.., D] f32   b [.., D] of any type
//! gb = f ⊙ γ ⊙ g             f by sequence, γ [D] f32, ones if absent
//! gγ = Σ_rows f ⊙ g ⊙ b
//! ```
//!
//! The gradient of x is that of y. The branch's first operation adds it to its own gradient.

use burn_backend::TensorMetadata;
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, Device, Tensor, TensorData};
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::accumulate::add_block_sums;
use super::{Rows, elem, empty, one_unit_each, vector_size};
use crate::ops::bridge::{Kernel, run};
use crate::ops::cast::cast;
use crate::ops::kept::SequenceFactors;
use crate::ops::link::Link;
use crate::ops::places::GradientPlace;

/// Number of rows of a block.
const BLOCK: usize = 64;

/// Ends a branch: see [`Skip::join`](crate::ops::Skip).
pub(in crate::ops) fn join<const D: usize>(
    x: Tensor<D>,
    b: Tensor<D>,
    gamma: Option<Tensor<1>>,
    factors: Option<SequenceFactors<'_>>,
    link: Link<CubeTensor>,
) -> Tensor<D> {
    let join = Join::new(factors, &x.device(), link);
    match gamma {
        Some(gamma) => run(ScaledJoin(join), [x.into(), b.into(), cast(gamma, DType::F32).into()]),
        None => run(join, [x.into(), b.into()]),
    }
}

/// Copies numbers to a device that CubeCL supports.
fn to_device(values: &[f32], device: &Device) -> CubeTensor {
    let data = TensorData::new(values.to_vec(), [values.len()]);
    let tensor = Tensor::<1>::from_data(data, device);
    // The device is that of a tensor for which `is_cube` was true.
    tensor.try_into_primitive::<CubeBackend>().expect("a tensor on a GPU")
}

/// Factors of the rows of sequences.
#[derive(Debug, Clone)]
pub(super) struct Factors {
    /// A factor for every `n_tokens` rows, in f32.
    pub(super) values: CubeTensor,
    pub(super) n_tokens: usize,
}

impl Factors {
    /// Copies factors to a device: one for each sequence if all have one length, otherwise one for
    /// each token.
    fn new(factors: SequenceFactors<'_>, device: &Device) -> Self {
        match factors.lengths.runs() {
            [run] => Self { values: to_device(factors.factors, device), n_tokens: run.length },
            _ => Self { values: to_device(&factors.by_token(), device), n_tokens: 1 },
        }
    }
}

/// The end of a branch without γ.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Join {
    pub(super) factors: Option<Factors>,
    /// Link to the branch's first operation, for the gradient of x.
    pub(super) link: Link<CubeTensor>,
}

/// The end of a branch with γ.
#[derive(Debug, Clone)]
struct ScaledJoin(Join);

impl Kernel<CubeBackend, 2> for Join {
    /// Type of the branch's output.
    type Saved = DType;

    fn forward(&self, [x, b]: [CubeTensor; 2]) -> (CubeTensor, DType) {
        let dtype = b.dtype;
        (self.add_scaled(&b, None, Some(&x), x.dtype), dtype)
    }

    fn backward(&self, dtype: DType, grad: CubeTensor, wanted: [bool; 2]) -> [Option<CubeTensor>; 2] {
        let gb = wanted[1].then(|| self.add_scaled(&grad, None, None, dtype));
        self.link.store(grad);
        [None, gb]
    }
}

impl Kernel<CubeBackend, 3> for ScaledJoin {
    /// The branch's output, and γ.
    type Saved = [CubeTensor; 2];

    fn forward(&self, [x, b, gamma]: [CubeTensor; 3]) -> (CubeTensor, Self::Saved) {
        (self.0.add_scaled(&b, Some(&gamma), Some(&x), x.dtype), [b, gamma])
    }

    fn backward(
        &self,
        [b, gamma]: Self::Saved,
        grad: CubeTensor,
        wanted: [bool; 3],
    ) -> [Option<CubeTensor>; 3] {
        let gb = wanted[1].then(|| self.0.add_scaled(&grad, Some(&gamma), None, b.dtype));
        let ggamma = wanted[2].then(|| {
            let sums = CubeBackend::float_sum_dim(self.0.partial_gamma_gradient(&grad, &b), 0);
            CubeBackend::float_reshape(sums, gamma.shape())
        });
        self.0.link.store(grad);
        [None, gb, ggamma]
    }

    /// Adds the gradient of γ to its place, if it has one.
    fn backward_to(
        &self,
        saved: Self::Saved,
        grad: CubeTensor,
        wanted: [bool; 3],
        places: [Option<GradientPlace>; 3],
    ) -> [Option<CubeTensor>; 3] {
        let [_, _, place] = places;
        if let Some(place) = &place {
            add_block_sums(&self.0.partial_gamma_gradient(&grad, &saved[0]), &[place]);
        }
        self.backward(saved, grad, [wanted[0], wanted[1], wanted[2] && place.is_none()])
    }
}

impl Join {
    /// Creates the end of a branch whose first operation takes the gradient of x from `link`.
    pub(in crate::ops) fn new(
        factors: Option<SequenceFactors<'_>>,
        device: &Device,
        link: Link<CubeTensor>,
    ) -> Self {
        Self { factors: factors.map(|factors| Factors::new(factors, device)), link }
    }

    /// Returns `x + f ⊙ γ ⊙ b` in `dtype`. An absent `x` is zero.
    fn add_scaled(
        &self,
        b: &CubeTensor,
        gamma: Option<&CubeTensor>,
        x: Option<&CubeTensor>,
        dtype: DType,
    ) -> CubeTensor {
        let has_x = x.is_some();
        let has_gamma = gamma.is_some();
        let has_factors = self.factors.is_some();
        let n_tokens = self.factors.as_ref().map_or(1, |factors| factors.n_tokens);
        let b = Rows::new(b);
        let y = Rows::new(&empty(&b.tensor, b.tensor.shape(), dtype));
        // In place of absent tensors, a buffer that is not read.
        let x = x.map_or_else(|| b.clone(), Rows::new);
        let gamma = gamma.map_or_else(|| b.clone(), Rows::new);
        let factors = self.factors.as_ref().map_or(&b.tensor, |factors| &factors.values);
        let n = vector_size(&[&b, &y, &x, &gamma]);
        let client = &b.tensor.client;
        let (count, dim) = one_unit_each(client, b.n_rows * b.d / n);
        join_kernel::launch(
            client,
            count,
            dim,
            n,
            b.arg(),
            x.arg(),
            gamma.arg(),
            factors.clone().into_buffer_arg(),
            y.arg(),
            b.stride / n,
            x.stride / n,
            y.stride / n,
            b.n_rows,
            n_tokens,
            b.d / n,
            has_x,
            has_gamma,
            has_factors,
            elem(&b.tensor),
            elem(&x.tensor),
            elem(&gamma.tensor),
            elem(factors),
            elem(&y.tensor),
        );
        y.tensor
    }

    /// Returns the sums of gγ over blocks of rows, `[blocks, 1, D]` in f32.
    fn partial_gamma_gradient(&self, grad: &CubeTensor, b: &CubeTensor) -> CubeTensor {
        let n_tokens = self.factors.as_ref().map_or(1, |factors| factors.n_tokens);
        let grad = Rows::new(grad);
        let b = Rows::new(b);
        let n_blocks = b.n_rows.div_ceil(BLOCK);
        let partial = empty(&b.tensor, [n_blocks, 1, b.d], DType::F32);
        let has_factors = self.factors.is_some();
        let factors = self.factors.as_ref().map_or(&b.tensor, |factors| &factors.values);
        let client = &b.tensor.client;
        let (count, dim) = one_unit_each(client, n_blocks * b.d);
        join_sums::launch(
            client,
            count,
            dim,
            grad.arg(),
            b.arg(),
            factors.clone().into_buffer_arg(),
            partial.clone().into_buffer_arg(),
            grad.stride,
            b.stride,
            b.n_rows,
            b.d,
            n_tokens,
            has_factors,
            elem(&grad.tensor),
            elem(&b.tensor),
            elem(factors),
        );
        partial
    }
}

#[cube(launch)]
fn join_kernel<B: Float, X: Float, G: Float, F: Float, Y: Float, N: Size>(
    b: &[Vector<B, N>],
    x: &[Vector<X, N>],
    gamma: &[Vector<G, N>],
    factors: &[F],
    y: &mut [Vector<Y, N>],
    b_stride: usize,
    x_stride: usize,
    y_stride: usize,
    n_rows: usize,
    n_tokens: usize,
    #[comptime] n_vectors: usize,
    #[comptime] has_x: bool,
    #[comptime] has_gamma: bool,
    #[comptime] has_factors: bool,
    #[define(B)] _b: ElemType,
    #[define(X)] _x: ElemType,
    #[define(G)] _gamma: ElemType,
    #[define(F)] _factors: ElemType,
    #[define(Y)] _y: ElemType,
) {
    let row = ABSOLUTE_POS / n_vectors;
    let column = ABSOLUTE_POS % n_vectors;
    if row < n_rows {
        let mut value = Vector::<f32, N>::cast_from(b[row * b_stride + column]);
        if has_gamma {
            value *= Vector::cast_from(gamma[column]);
        }
        if has_factors {
            value *= Vector::new(f32::cast_from(factors[row / n_tokens]));
        }
        if has_x {
            value += Vector::cast_from(x[row * x_stride + column]);
        }
        y[row * y_stride + column] = Vector::cast_from(value);
    }
}

/// Sums f ⊙ g ⊙ b over blocks of rows: a unit sums one column of one block.
#[cube(launch)]
fn join_sums<G: Float, B: Float, F: Float>(
    grad: &[G],
    b: &[B],
    factors: &[F],
    sums: &mut [f32],
    grad_stride: usize,
    b_stride: usize,
    n_rows: usize,
    d: usize,
    n_tokens: usize,
    #[comptime] has_factors: bool,
    #[define(G)] _grad: ElemType,
    #[define(B)] _b: ElemType,
    #[define(F)] _factors: ElemType,
) {
    let block = ABSOLUTE_POS / d;
    let column = ABSOLUTE_POS % d;
    let first = block * BLOCK;
    if first < n_rows {
        let mut total = 0.0f32;
        for row in first..min(first + BLOCK, n_rows) {
            let mut value =
                f32::cast_from(grad[row * grad_stride + column]) * f32::cast_from(b[row * b_stride + column]);
            if has_factors {
                value *= f32::cast_from(factors[row / n_tokens]);
            }
            total += value;
        }
        sums[ABSOLUTE_POS] = total;
    }
}
