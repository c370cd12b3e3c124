//! [`layer_norm`](crate::ops::layer_norm). The lanes of a row compute its moments.
//!
//! ```text
//! x̂ = (x - mean(x)) · r        r = 1 / √(var(x) + ε)     moments [rows, 2]: mean and r
//! y = x̂ · γ + β                                          x, y [.., D]
//! ```
//!
//! See [`super::norm_gradient`] for the backward pass.

use burn_backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::DType;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::lanes;
use super::lanes::Lanes;
use super::norm_gradient::{NormGradient, parameter_gradients};
use super::{Rows, cast, cube_count, elem, empty, vector_size};
use crate::ops::bridge::Kernel;
use crate::ops::link::Link;
use crate::ops::places::GradientPlace;

/// Kernels of the forward and backward pass.
#[derive(Debug, Clone)]
pub(in crate::ops) struct LayerNorm {
    pub(in crate::ops) epsilon: f32,
    /// Type of y.
    pub(in crate::ops) output: DType,
    /// Link through which the end of a branch passes the gradient of its skip connection.
    pub(in crate::ops) link: Option<Link<CubeTensor>>,
}

/// The input, the moments `[rows, 2]`, and γ.
type Saved = (CubeTensor, CubeTensor, CubeTensor);

impl Kernel<CubeBackend, 3> for LayerNorm {
    type Saved = Saved;

    fn forward(&self, [x, gamma, beta]: [CubeTensor; 3]) -> (CubeTensor, Saved) {
        let x = Rows::new(&x);
        let gamma = Rows::new(&gamma);
        let beta = Rows::new(&beta);
        let y = Rows::new(&empty(&x.tensor, x.tensor.shape(), self.output));
        let moments = empty(&x.tensor, [x.n_rows, 2], DType::F32);
        let n = vector_size(&[&x, &y, &gamma, &beta]);
        let client = &x.tensor.client;
        let lanes = Lanes::for_client(client);
        layer_norm_forward::launch(
            client,
            cube_count(client, Lanes::n_cubes(x.n_rows)),
            lanes.dim(),
            n,
            x.arg(),
            gamma.arg(),
            beta.arg(),
            y.arg(),
            moments.clone().into_buffer_arg(),
            x.stride / n,
            y.stride / n,
            x.n_rows,
            self.epsilon,
            x.d / n,
            lanes,
            elem(&x.tensor),
            elem(&gamma.tensor),
            elem(&y.tensor),
        );
        (y.tensor, (x.tensor, moments, gamma.tensor))
    }

    fn backward(&self, saved: Saved, grad: CubeTensor, wanted: [bool; 3]) -> [Option<CubeTensor>; 3] {
        self.backward_to(saved, grad, wanted, [const { None }; 3])
    }

    /// Adds the gradients of γ and β to their places, if they have one.
    fn backward_to(
        &self,
        (x, moments, gamma): Saved,
        grad: CubeTensor,
        wanted: [bool; 3],
        places: [Option<GradientPlace>; 3],
    ) -> [Option<CubeTensor>; 3] {
        let [wants_input, wants_gamma, wants_beta] = wanted;
        let [_, gamma_place, beta_place] = places;
        let dtype = gamma.dtype;
        let norm = NormGradient {
            x: Rows::new(&x),
            moments,
            gamma: Rows::new(&gamma),
            grad: Rows::new(&grad),
            skip: self.link.as_ref().and_then(Link::take),
        };
        let gradients = norm.compute(None, wants_gamma || wants_beta);
        let parameters =
            parameter_gradients(gradients.sums, [gamma_place, beta_place], [wants_gamma, wants_beta]);
        let [gamma, beta] = parameters.map(|sum| sum.map(|sum| cast(sum, dtype)));
        [wants_input.then_some(gradients.gx), gamma, beta]
    }
}

#[cube(launch)]
fn layer_norm_forward<F: Float, G: Float, O: Float, N: Size>(
    x: &[Vector<F, N>],
    gamma: &[Vector<G, N>],
    beta: &[Vector<G, N>],
    y: &mut [Vector<O, N>],
    moments: &mut [f32],
    x_stride: usize,
    y_stride: usize,
    n_rows: usize,
    epsilon: f32,
    #[comptime] n_vectors: usize,
    #[comptime] lanes: Lanes,
    #[define(F)] _dtype: ElemType,
    #[define(G)] _parameters: ElemType,
    #[define(O)] _output: ElemType,
) {
    let row = lanes::row();
    let lane = UNIT_POS_X as usize;
    let d = f32::cast_from(n_vectors * N::value());
    // Units beyond the last row compute the last one: all units must take part in the sums.
    let start = min(row, n_rows - 1) * x_stride;

    let mut total = Vector::<f32, N>::new(0.0f32);
    for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
        total += Vector::cast_from(x[start + i]);
    }
    let mean = lanes::sum(total.vector_sum(), lanes) / d;

    let mut squares = Vector::<f32, N>::new(0.0f32);
    for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
        let centered = Vector::<f32, N>::cast_from(x[start + i]) - Vector::new(mean);
        squares += centered * centered;
    }
    let factor = 1.0f32 / (lanes::sum(squares.vector_sum(), lanes) / d + epsilon).sqrt();

    if row < n_rows {
        for i in range_stepped(lane, n_vectors, comptime!(lanes.n)) {
            let normalized =
                (Vector::<f32, N>::cast_from(x[start + i]) - Vector::new(mean)) * Vector::new(factor);
            let scaled = normalized * Vector::cast_from(gamma[i]) + Vector::cast_from(beta[i]);
            y[row * y_stride + i] = Vector::cast_from(scaled);
        }
        if lane == 0 {
            moments[2 * row] = mean;
            moments[2 * row + 1] = factor;
        }
    }
}
