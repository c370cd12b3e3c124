//! The end of a residual branch and the layer norm at the start of the next one, in one pass in
//! each direction.
//!
//! ```text
//! y = x + f ⊙ c ⊙ b       x, y [.., D] f32   b [.., D] of any type   f by sequence   c [D], ones if absent
//! h = norm(y)             in the type of products
//! ```
//!
//! Autodiff tracks h alone. The gradient of y, a skip connection, comes from the end of the next
//! branch through a link, and the gradient of x is passed to the start of this branch by another.
//! See [`super::norm_gradient`] for the backward pass.

use burn_backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, Tensor};
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::join::Join;
use super::lanes;
use super::lanes::Lanes;
use super::layer_norm::LayerNorm;
use super::norm_gradient::{BranchEnd, NormGradient, NormGradients, ScaledOutput, parameter_gradients};
use super::{Rows, cast, cube_count, elem, empty, vector_size};
use crate::ops::bridge::{Kernel, PrimitiveBackend, run};
use crate::ops::cast::cast as cast_tensor;
use crate::ops::link::Link;
use crate::ops::places::GradientPlace;

/// Ends a branch and normalizes the sum: returns the normalized values, and the sum without a
/// graph. The branch's output is `b`, scaled by `scale`; γ and β are those of the norm.
pub(in crate::ops) fn join_norm<const D: usize>(
    join: Join,
    norm: LayerNorm,
    [x, b]: [Tensor<D>; 2],
    scale: Option<Tensor<1>>,
    [gamma, beta]: [Tensor<1>; 2],
) -> (Tensor<D>, Tensor<D>) {
    let sum = Link::default();
    let kernel = JoinNorm { join, norm, sum: sum.clone() };
    let normalized = match scale {
        Some(scale) => {
            let scale = cast_tensor(scale, DType::F32);
            run(ScaledJoinNorm(kernel), [x.into(), b.into(), gamma.into(), beta.into(), scale.into()])
        }
        None => run(kernel, [x.into(), b.into(), gamma.into(), beta.into()]),
    };
    let sum = sum.take().expect("the forward pass stores the sum");
    (normalized, CubeBackend::from_primitive(sum))
}

/// The end of a branch without a scale, and the norm after it.
#[derive(Debug, Clone)]
struct JoinNorm {
    join: Join,
    norm: LayerNorm,
    /// Holds y after the forward pass.
    sum: Link<CubeTensor>,
}

/// The end of a branch with a scale, and the norm after it.
#[derive(Debug, Clone)]
struct ScaledJoinNorm(JoinNorm);

/// Tensors kept for the backward pass.
#[derive(Debug, Clone)]
struct Saved {
    /// Sum y.
    y: CubeTensor,
    /// Moments of its rows, `[rows, 2]`.
    moments: CubeTensor,
    gamma: CubeTensor,
    /// Type of the branch's output.
    dtype: DType,
}

impl Kernel<CubeBackend, 4> for JoinNorm {
    type Saved = Saved;

    fn forward(&self, [x, b, gamma, beta]: [CubeTensor; 4]) -> (CubeTensor, Saved) {
        self.normalize_sum(&x, &b, None, gamma, &beta)
    }

    fn backward(&self, saved: Saved, grad: CubeTensor, wanted: [bool; 4]) -> [Option<CubeTensor>; 4] {
        self.backward_to(saved, grad, wanted, [const { None }; 4])
    }

    /// Adds the gradients of γ and β to their places, if they have one.
    fn backward_to(
        &self,
        saved: Saved,
        grad: CubeTensor,
        wanted: [bool; 4],
        places: [Option<GradientPlace>; 4],
    ) -> [Option<CubeTensor>; 4] {
        let dtype = saved.gamma.dtype;
        let [_, _, wants_gamma, wants_beta] = wanted;
        let [_, _, gamma_place, beta_place] = places;
        let gradients = self.gradients(saved, grad, None, wants_gamma || wants_beta);
        let parameters =
            parameter_gradients(gradients.sums, [gamma_place, beta_place], [wants_gamma, wants_beta]);
        let [gamma, beta] = parameters.map(|sum| sum.map(|sum| cast(sum, dtype)));
        [None, gradients.gb, gamma, beta]
    }
}

impl Kernel<CubeBackend, 5> for ScaledJoinNorm {
    /// What is kept without a scale, the scale, and the branch's output.
    type Saved = (Saved, CubeTensor, CubeTensor);

    fn forward(&self, [x, b, gamma, beta, scale]: [CubeTensor; 5]) -> (CubeTensor, Self::Saved) {
        let (h, saved) = self.0.normalize_sum(&x, &b, Some(&scale), gamma, &beta);
        (h, (saved, scale, b))
    }

    fn backward(&self, saved: Self::Saved, grad: CubeTensor, wanted: [bool; 5]) -> [Option<CubeTensor>; 5] {
        self.backward_to(saved, grad, wanted, [const { None }; 5])
    }

    /// Adds the gradients of γ, β and the scale to their places, if they have one.
    fn backward_to(
        &self,
        (saved, scale, b): Self::Saved,
        grad: CubeTensor,
        wanted: [bool; 5],
        places: [Option<GradientPlace>; 5],
    ) -> [Option<CubeTensor>; 5] {
        let dtype = saved.gamma.dtype;
        let [_, _, wants_gamma, wants_beta, wants_scale] = wanted;
        let [_, _, gamma_place, beta_place, scale_place] = places;
        let wants_sums = wants_gamma || wants_beta || wants_scale;
        let gradients = self.0.gradients(saved, grad, Some(ScaledOutput { scale, b }), wants_sums);
        let parameter_places = [gamma_place, beta_place, scale_place];
        let [gamma, beta, scale] =
            parameter_gradients(gradients.sums, parameter_places, [wants_gamma, wants_beta, wants_scale]);
        let gamma = gamma.map(|sum| cast(sum, dtype));
        let beta = beta.map(|sum| cast(sum, dtype));
        [None, gradients.gb, gamma, beta, scale]
    }
}

impl JoinNorm {
    /// Returns `norm(y)`, and stores y, the sum of `x` and the branch's output `b`.
    fn normalize_sum(
        &self,
        x: &CubeTensor,
        b: &CubeTensor,
        scale: Option<&CubeTensor>,
        gamma: CubeTensor,
        beta: &CubeTensor,
    ) -> (CubeTensor, Saved) {
        let dtype = b.dtype;
        let x = Rows::new(x);
        let b = Rows::new(b);
        let gamma_row = Rows::new(&gamma);
        let beta = Rows::new(beta);
        let y = x.empty_like();
        let h = Rows::new(&empty(&x.tensor, x.tensor.shape(), self.norm.output));
        let moments = empty(&x.tensor, [x.n_rows, 2], DType::F32);
        let factors = self.join.factors.as_ref();
        // In place of absent tensors, buffers that are not read.
        let scale_row = scale.map_or_else(|| x.clone(), Rows::new);
        let factor_values = factors.map_or(&x.tensor, |factors| &factors.values);
        let n = vector_size(&[&x, &b, &y, &h, &gamma_row, &beta, &scale_row]);
        let client = &x.tensor.client;
        let form = Form {
            n_vectors: x.d / n,
            has_factors: factors.is_some(),
            has_scale: scale.is_some(),
            lanes: Lanes::for_client(client),
        };
        join_norm_kernel::launch(
            client,
            cube_count(client, Lanes::n_cubes(x.n_rows)),
            form.lanes.dim(),
            n,
            x.arg(),
            b.arg(),
            scale_row.arg(),
            factor_values.clone().into_buffer_arg(),
            gamma_row.arg(),
            beta.arg(),
            y.arg(),
            h.arg(),
            moments.clone().into_buffer_arg(),
            x.stride / n,
            b.stride / n,
            y.stride / n,
            h.stride / n,
            x.n_rows,
            factors.map_or(1, |factors| factors.n_tokens),
            self.norm.epsilon,
            form,
            elem(&x.tensor),
            elem(&b.tensor),
            elem(&scale_row.tensor),
            elem(factor_values),
            elem(&gamma),
            elem(&h.tensor),
        );
        self.sum.store(y.tensor.clone());
        (h.tensor, Saved { y: y.tensor, moments, gamma, dtype })
    }

    /// Returns the gradients, and stores that of x for the start of the branch.
    fn gradients(
        &self,
        saved: Saved,
        grad: CubeTensor,
        scale: Option<ScaledOutput>,
        wants_sums: bool,
    ) -> NormGradients {
        let norm = NormGradient {
            x: Rows::new(&saved.y),
            moments: saved.moments,
            gamma: Rows::new(&saved.gamma),
            grad: Rows::new(&grad),
            skip: self.norm.link.as_ref().and_then(Link::take),
        };
        let end = BranchEnd { factors: self.join.factors.as_ref(), scale, dtype: saved.dtype };
        let gradients = norm.compute(Some(&end), wants_sums);
        self.join.link.store(gradients.gx.clone());
        gradients
    }
}

/// What the forward kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    /// Vectors of a row.
    n_vectors: usize,
    has_factors: bool,
    has_scale: bool,
    lanes: Lanes,
}

#[cube(launch)]
fn join_norm_kernel<X: Float, B: Float, C: Float, S: Float, G: Float, H: Float, N: Size>(
    x: &[Vector<X, N>],
    b: &[Vector<B, N>],
    scale: &[Vector<C, N>],
    factors: &[S],
    gamma: &[Vector<G, N>],
    beta: &[Vector<G, N>],
    y: &mut [Vector<X, N>],
    h: &mut [Vector<H, N>],
    moments: &mut [f32],
    x_stride: usize,
    b_stride: usize,
    y_stride: usize,
    h_stride: usize,
    n_rows: usize,
    n_tokens: usize,
    epsilon: f32,
    #[comptime] form: Form,
    #[define(X)] _input: ElemType,
    #[define(B)] _branch: ElemType,
    #[define(C)] _scale: ElemType,
    #[define(S)] _factors: ElemType,
    #[define(G)] _parameters: ElemType,
    #[define(H)] _output: ElemType,
) {
    let row = lanes::row();
    let lane = UNIT_POS_X as usize;
    let n_lanes = comptime!(form.lanes.n);
    let n_each = comptime!(form.n_vectors.div_ceil(form.lanes.n));
    let d = f32::cast_from(form.n_vectors * N::value());
    // Units beyond the last row compute the last one: all units must take part in the sums.
    let read_row = min(row, n_rows - 1);

    // The lane's part of the row of y.
    let mut values = Array::<Vector<f32, N>>::new(n_each);
    let mut total = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..n_each {
        let column = lane + i * n_lanes;
        if column < form.n_vectors {
            let mut value = Vector::<f32, N>::cast_from(b[read_row * b_stride + column]);
            if form.has_scale {
                value *= Vector::cast_from(scale[column]);
            }
            if form.has_factors {
                value *= Vector::new(f32::cast_from(factors[read_row / n_tokens]));
            }
            value += Vector::cast_from(x[read_row * x_stride + column]);
            values[i] = value;
            total += value;
        }
    }
    let mean = lanes::sum(total.vector_sum(), form.lanes) / d;

    let mut squares = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..n_each {
        if lane + i * n_lanes < form.n_vectors {
            let centered = values[i] - Vector::new(mean);
            squares += centered * centered;
        }
    }
    let factor = 1.0f32 / (lanes::sum(squares.vector_sum(), form.lanes) / d + epsilon).sqrt();

    if row < n_rows {
        #[unroll]
        for i in 0..n_each {
            let column = lane + i * n_lanes;
            if column < form.n_vectors {
                let value = values[i];
                y[row * y_stride + column] = Vector::cast_from(value);
                let normalized = (value - Vector::new(mean)) * Vector::new(factor);
                let scaled = normalized * Vector::cast_from(gamma[column]) + Vector::cast_from(beta[column]);
                h[row * h_stride + column] = Vector::cast_from(scaled);
            }
        }
        if lane == 0 {
            moments[2 * row] = mean;
            moments[2 * row + 1] = factor;
        }
    }
}
