//! Squeeze and excitation (Hu et al. 2018).
//!
//! ```text
//! s = sigmoid(W₂ relu(W₁ mean(x) + b₁) + b₂)      y[b, n, c] = s[b, c] · x[b, n, c]      x, y [B, N, C]
//! ```

use burn_tensor::Tensor;
use burn_tensor::activation::sigmoid;
use kernels::ops::{fork, grid_mean, linear, relu, scale_channels};

use crate::params::{Init, ParamSpec};
use crate::unit::{Context, Cost, GroupShape};

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
    /// Returns the names, output channels and input channels of both layers.
    fn layers(&self) -> [(String, usize, usize); 2] {
        let name = |layer: &str| format!("{}.{layer}", self.name);
        [(name("fc1"), self.squeezed, self.width), (name("fc2"), self.width, self.squeezed)]
    }

    pub(super) fn params(&self) -> Vec<ParamSpec> {
        let of_layer = |(name, output, input): (String, usize, usize)| {
            let weight = Init::Normal((2.0 / output as f32).sqrt());
            // PyTorch's default.
            let bias = Init::Uniform(1.0 / (input as f32).sqrt());
            [
                ParamSpec::weight(format!("{name}.weight"), [output, input, 1, 1], weight),
                ParamSpec { init: bias, ..ParamSpec::vector(format!("{name}.bias"), output, 0.0) },
            ]
        };
        self.layers().into_iter().flat_map(of_layer).collect()
    }

    /// Applies the excitation to `x` of `[B, N, C]`.
    pub(super) fn of(&self, x: Tensor<3>, cx: &Context<'_>) -> Tensor<3> {
        let [to_squeezed, to_width] = self.layers();
        let layer = |x: Tensor<3>, (name, output, input): (String, usize, usize)| {
            let weight = cx.leaves.get::<4>(&format!("{name}.weight")).reshape([output, input]);
            linear(x, weight, cx.leaves.get(&format!("{name}.bias")))
        };
        let [x, squeezed] = fork(x);
        let squeezed = relu(layer(grid_mean(squeezed), to_squeezed));
        scale_channels(x, sigmoid(layer(squeezed, to_width)))
    }

    pub(super) fn cost(&self, shape: GroupShape) -> Cost {
        let products = 2 * self.width * self.squeezed * shape.n_views;
        Cost { flops: 2.0 * products as f64, graph: GroupShape { is_map: true, ..shape }.elements() }
    }
}
