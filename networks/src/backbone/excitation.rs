//! Squeeze and excitation (Hu et al. 2018).
//!
//! ```text
//! s = sigmoid(W₂ relu(W₁ mean(x) + b₁) + b₂)      y[b, n, c] = s[b, c] · x[b, n, c]      x, y [B, N, C]
//! ```

use std::ops::Range;

use burn_tensor::Tensor;
use kernels::ops::linear;

use crate::params::{Init, ParamSpec};
use crate::unit::Context;

/// A squeeze and excitation.
#[derive(Debug, Clone)]
pub(super) struct Excitation {
    /// Prefix of the parameters.
    pub name: String,
    /// Channels, C.
    pub width: usize,
    /// Channels between the two layers.
    pub squeezed: usize,
}

impl Excitation {
    /// Returns the parameters of the first layer for these columns of its output.
    pub(super) fn squeeze_params(&self, columns: Range<usize>) -> Vec<ParamSpec> {
        self.params("fc1", self.squeezed, self.width, columns)
    }

    /// Returns the parameters of the second layer for these columns of its output.
    pub(super) fn excite_params(&self, columns: Range<usize>) -> Vec<ParamSpec> {
        self.params("fc2", self.width, self.squeezed, columns)
    }

    fn params(&self, layer: &str, output: usize, input: usize, columns: Range<usize>) -> Vec<ParamSpec> {
        let name = format!("{}.{layer}", self.name);
        let init = Init::Normal((2.0 / output as f32).sqrt());
        let weight = ParamSpec::weight(format!("{name}.weight"), [output, input, 1, 1], init);
        // PyTorch's default.
        let init = Init::Uniform(1.0 / (input as f32).sqrt());
        let bias = ParamSpec { init, ..ParamSpec::vector(format!("{name}.bias"), output, 0.0) };
        vec![weight.rows(columns.clone()), bias.rows(columns)]
    }

    /// Returns the columns of W₁ x + b₁ whose parameters are in `cx`, for the mean `x` of `[B, C]`.
    pub(super) fn squeezed(&self, x: Tensor<2>, cx: &Context<'_>) -> Tensor<2> {
        self.layer("fc1", x, cx)
    }

    /// Returns the columns of W₂ x + b₂ whose parameters are in `cx`, for `x` of `[B, S]` between
    /// the two layers.
    pub(super) fn excited(&self, x: Tensor<2>, cx: &Context<'_>) -> Tensor<2> {
        self.layer("fc2", x, cx)
    }

    fn layer(&self, layer: &str, x: Tensor<2>, cx: &Context<'_>) -> Tensor<2> {
        let name = format!("{}.{layer}", self.name);
        let weight = cx.leaves.get::<4>(&format!("{name}.weight"));
        let [output, input, ..] = weight.dims();
        linear(x, weight.reshape([output, input]), cx.leaves.get(&format!("{name}.bias")))
    }
}
