//! Gradients of a layer norm, and of the end of the residual branch before it, in one pass.
//!
//! ```text
//! gx = s + r · (h - mean(h) - x̂ · mean(h · x̂))    h = g · γ, x̂ = (x - mean) · r, [.., D]
//! gb = f ⊙ c ⊙ gx                                 if x = x' + f ⊙ c ⊙ b ends a branch
//! gγ = Σ_rows g · x̂      gβ = Σ_rows g      gc = Σ_rows f ⊙ gx ⊙ b      [D]
//! ```
//!
//! s is the gradient of the skip connection that starts at x, zero if there is none. The lanes of a
//! row compute gx and gb of one row after another; then the units of a cube sum the columns of the
//! same rows, which they read again from the cache.

use burn_backend::TensorMetadata;
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::DType;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::accumulate::{add_block_sums, add_to_place};
use super::join::Factors;
use super::lanes;
use super::lanes::Lanes;
use super::{Rows, cube_count, elem, empty, vector_size};
use crate::ops::places::GradientPlace;

/// Number of rows of a cube.
const BLOCK: usize = 64;

/// What a layer norm kept, and the gradient of its output.
pub(super) struct NormGradient {
    /// The input.
    pub(super) x: Rows,
    /// Mean and r of each row, `[rows, 2]`.
    pub(super) moments: CubeTensor,
    pub(super) gamma: Rows,
    /// Gradient of the output.
    pub(super) grad: Rows,
    /// Gradient of the skip connection that starts at the input.
    pub(super) skip: Option<CubeTensor>,
}

/// The end of a branch, whose sum is the input of the norm.
pub(super) struct BranchEnd<'a> {
    pub(super) factors: Option<&'a Factors>,
    /// Scale of channels and the branch's output; absent without LayerScale.
    pub(super) scale: Option<ScaledOutput>,
    /// Type of the branch's output.
    pub(super) dtype: DType,
}

/// The scale of a branch's channels, and the output that it scales.
pub(super) struct ScaledOutput {
    /// c, `[D]` in f32.
    pub(super) scale: CubeTensor,
    /// b, `[.., D]`.
    pub(super) b: CubeTensor,
}

/// The gradients.
pub(super) struct NormGradients {
    /// gx, in the type of x.
    pub(super) gx: CubeTensor,
    /// gb, if a branch ends at x.
    pub(super) gb: Option<CubeTensor>,
    /// Sums of gγ, gβ and, with a scale, gc over blocks of rows, `[blocks, 2 or 3, D]` in f32, if
    /// wanted.
    pub(super) sums: Option<CubeTensor>,
}

/// What a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    /// Vectors of a row.
    n_vectors: usize,
    /// Whether the gradient of a skip connection is added.
    adds: bool,
    /// Whether a branch ends at x.
    ends_branch: bool,
    has_factors: bool,
    has_scale: bool,
    /// Number of sums over rows for each column: none, two or three.
    n_sums: usize,
    lanes: Lanes,
}

impl NormGradient {
    /// Computes the gradients, with those of a branch that ends at x, and with the sums of the
    /// parameters' gradients if `wants_sums`.
    pub(super) fn compute(&self, end: Option<&BranchEnd<'_>>, wants_sums: bool) -> NormGradients {
        let x = &self.x;
        let gx = x.empty_like();
        // Absent inputs are replaced by buffers of the right type that are not read, absent outputs
        // by small ones that are not written.
        let skipped = self.skip.as_ref().map_or_else(|| x.clone(), Rows::new);
        let scaled = end.and_then(|end| end.scale.as_ref());
        let scale = scaled.map_or_else(|| x.clone(), |scaled| Rows::new(&scaled.scale));
        let b = scaled.map_or_else(|| x.clone(), |scaled| Rows::new(&scaled.b));
        let factors = end.and_then(|end| end.factors);
        let gb = match end {
            Some(end) => Rows::new(&empty(&x.tensor, x.tensor.shape(), end.dtype)),
            None => self.unused(),
        };
        let n_blocks = x.n_rows.div_ceil(BLOCK);
        let n_sums = match (wants_sums, scaled) {
            (false, _) => 0,
            (true, None) => 2,
            (true, Some(_)) => 3,
        };
        let sums = match n_sums {
            0 => self.unused(),
            _ => Rows::new(&empty(&x.tensor, [n_blocks, n_sums, x.d], DType::F32)),
        };
        let factor_values = factors.map_or(&self.moments, |factors| &factors.values);
        let mut rows = vec![x, &self.grad, &gx, &self.gamma, &skipped];
        if end.is_some() {
            rows.extend([&gb, &b, &scale]);
        }
        if wants_sums {
            rows.push(&sums);
        }
        let n = vector_size(&rows);
        let client = &x.tensor.client;
        let form = Form {
            n_vectors: x.d / n,
            adds: self.skip.is_some(),
            ends_branch: end.is_some(),
            has_factors: factors.is_some(),
            has_scale: scaled.is_some(),
            n_sums,
            lanes: Lanes::for_client(client),
        };
        norm_gradient_kernel::launch(
            client,
            cube_count(client, n_blocks),
            form.lanes.dim(),
            n,
            x.arg(),
            self.moments.clone().into_buffer_arg(),
            self.gamma.arg(),
            self.grad.arg(),
            skipped.arg(),
            b.arg(),
            scale.arg(),
            factor_values.clone().into_buffer_arg(),
            gx.arg(),
            gb.arg(),
            sums.arg(),
            x.stride / n,
            self.grad.stride / n,
            skipped.stride / n,
            b.stride / n,
            gx.stride / n,
            gb.stride / n,
            x.n_rows,
            factors.map_or(1, |factors| factors.n_tokens),
            form,
            elem(&x.tensor),
            elem(&self.gamma.tensor),
            elem(&self.grad.tensor),
            elem(&b.tensor),
            elem(&scale.tensor),
            elem(&gb.tensor),
        );
        NormGradients {
            gx: gx.tensor,
            gb: end.is_some().then_some(gb.tensor),
            sums: wants_sums.then_some(sums.tensor),
        }
    }

    /// Returns a small output that no unit writes.
    fn unused(&self) -> Rows {
        Rows::new(&empty(&self.x.tensor, [1, self.x.d], DType::F32))
    }
}

/// Adds the gradients of parameters, whose sums over blocks are `sums` of `[blocks, N, D]`, to the
/// places of those that have one, and returns the others that are wanted, `[D]` in f32.
pub(super) fn parameter_gradients<const N: usize>(
    sums: Option<CubeTensor>,
    places: [Option<GradientPlace>; N],
    wanted: [bool; N],
) -> [Option<CubeTensor>; N] {
    let mut returned = [const { None }; N];
    let Some(sums) = sums else { return returned };
    let all_places: Vec<&GradientPlace> = places.iter().flatten().collect();
    if all_places.len() == N {
        add_block_sums(&sums, &all_places);
        return returned;
    }
    let d = sums.meta.shape()[2];
    let totals = CubeBackend::float_reshape(CubeBackend::float_sum_dim(sums, 0), [N, d].into());
    for (index, place) in places.iter().enumerate() {
        let row = CubeBackend::float_slice(totals.clone(), &[(index..index + 1).into(), (0..d).into()]);
        let row = CubeBackend::float_reshape(row, [d].into());
        match place {
            Some(place) => add_to_place(place, &row),
            None if wanted[index] => returned[index] = Some(row),
            None => {}
        }
    }
    returned
}

#[cube(launch)]
fn norm_gradient_kernel<F: Float, G: Float, O: Float, B: Float, C: Float, E: Float, N: Size>(
    x: &[Vector<F, N>],
    moments: &[f32],
    gamma: &[Vector<G, N>],
    grad: &[Vector<O, N>],
    skipped: &[Vector<F, N>],
    b: &[Vector<B, N>],
    scale: &[Vector<C, N>],
    factors: &[f32],
    gx: &mut [Vector<F, N>],
    gb: &mut [Vector<E, N>],
    sums: &mut [Vector<f32, N>],
    x_stride: usize,
    grad_stride: usize,
    skipped_stride: usize,
    b_stride: usize,
    gx_stride: usize,
    gb_stride: usize,
    n_rows: usize,
    n_tokens: usize,
    #[comptime] form: Form,
    #[define(F)] _input: ElemType,
    #[define(G)] _parameters: ElemType,
    #[define(O)] _output: ElemType,
    #[define(B)] _branch: ElemType,
    #[define(C)] _scale: ElemType,
    #[define(E)] _branch_gradient: ElemType,
) {
    let lane = UNIT_POS_X as usize;
    let first = CUBE_POS * BLOCK;
    let d = f32::cast_from(form.n_vectors * N::value());
    let n_rows_at_once = CUBE_DIM_Y as usize;
    // As many steps for all lanes, with a check of the column: for compute capability 9.0, `ptxas`
    // spills registers in loops whose number of steps depends on the lane.
    let n_steps = comptime!(form.n_vectors.div_ceil(form.lanes.n));

    for i in 0..BLOCK / n_rows_at_once {
        let row = first + i * n_rows_at_once + UNIT_POS_Y as usize;
        // Units beyond the last row compute the last one: all units must take part in the sums.
        let read_row = min(row, n_rows - 1);
        let mean = moments[2 * read_row];
        let factor = moments[2 * read_row + 1];
        let mut total = Vector::<f32, N>::new(0.0f32);
        let mut dot = Vector::<f32, N>::new(0.0f32);
        for step in 0..n_steps {
            let column = lane + step * form.lanes.n;
            if column < form.n_vectors {
                let normalized = (Vector::<f32, N>::cast_from(x[read_row * x_stride + column])
                    - Vector::new(mean))
                    * Vector::new(factor);
                let h = Vector::<f32, N>::cast_from(grad[read_row * grad_stride + column])
                    * Vector::cast_from(gamma[column]);
                total += h;
                dot += h * normalized;
            }
        }
        let total = lanes::sum(total.vector_sum(), form.lanes) / d;
        let dot = lanes::sum(dot.vector_sum(), form.lanes) / d;

        if row < n_rows {
            for step in 0..n_steps {
                let column = lane + step * form.lanes.n;
                if column < form.n_vectors {
                    let normalized = (Vector::<f32, N>::cast_from(x[row * x_stride + column])
                        - Vector::new(mean))
                        * Vector::new(factor);
                    let h = Vector::<f32, N>::cast_from(grad[row * grad_stride + column])
                        * Vector::cast_from(gamma[column]);
                    let mut value =
                        (h - Vector::new(total) - normalized * Vector::new(dot)) * Vector::new(factor);
                    if form.adds {
                        value += Vector::cast_from(skipped[row * skipped_stride + column]);
                    }
                    gx[row * gx_stride + column] = Vector::cast_from(value);
                    if form.ends_branch {
                        if form.has_scale {
                            value *= Vector::cast_from(scale[column]);
                        }
                        if form.has_factors {
                            value *= Vector::new(factors[row / n_tokens]);
                        }
                        gb[row * gb_stride + column] = Vector::cast_from(value);
                    }
                }
            }
        }
    }

    if comptime!(form.n_sums > 0) {
        // The units of other lanes wrote some of the rows of gx.
        sync_storage();
        let end = min(first + BLOCK, n_rows);
        if first < n_rows {
            for column in range_stepped(UNIT_POS as usize, form.n_vectors, CUBE_DIM as usize) {
                let mut gamma_sum = Vector::<f32, N>::new(0.0f32);
                let mut beta_sum = Vector::<f32, N>::new(0.0f32);
                for row in first..end {
                    let centered = Vector::<f32, N>::cast_from(x[row * x_stride + column])
                        - Vector::new(moments[2 * row]);
                    let g = Vector::<f32, N>::cast_from(grad[row * grad_stride + column]);
                    gamma_sum += g * centered * Vector::new(moments[2 * row + 1]);
                    beta_sum += g;
                }
                // Computed after the sums: kept during them, it is spilled in some forms.
                let start = CUBE_POS * comptime!(form.n_sums * form.n_vectors) + column;
                sums[start] = gamma_sum;
                sums[start + form.n_vectors] = beta_sum;
                // In a loop of its own: three sums at a time need more registers.
                if form.has_scale {
                    let mut scale_sum = Vector::<f32, N>::new(0.0f32);
                    for row in first..end {
                        let mut product = Vector::<f32, N>::cast_from(gx[row * gx_stride + column])
                            * Vector::cast_from(b[row * b_stride + column]);
                        if form.has_factors {
                            product *= Vector::new(factors[row / n_tokens]);
                        }
                        scale_sum += product;
                    }
                    sums[start + comptime!(2 * form.n_vectors)] = scale_sum;
                }
            }
        }
    }
}
