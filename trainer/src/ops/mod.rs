//! The operations that training spends its time in, each with several bodies.
//!
//! On the CPU backend (Flex) and on GPUs ([`cube`]) an operation runs as a kernel with a hand-written backward
//! pass, registered with Burn's autodiff as a single step; `plain` is a composition
//! of Burn's own operations. All compute the same formula, which stands at the head of each file,
//! and the tests compare them. What this buys: Burn's softmax and layer norm are a dozen passes
//! over memory under autodiff, and copies of permuted tensors cost as much as the products between
//! them.

mod attention;
mod batch_norm;
mod bridge;
mod cast;
mod conv;
mod cpu;
mod cross_entropy;
#[cfg(feature = "cube")]
pub(crate) mod cube;
mod fork;
mod gelu;
pub(crate) mod gemm;
mod grid_mean;
mod layer_norm;
mod linear;
mod log_distance;
mod math;
mod mlp;
mod number;
mod probs;
mod product;
mod relu;
mod residual;
mod seed;
mod sequence;
mod shared;
pub(crate) mod tally;
mod unit_rows;
mod waves;
mod weight_norm;

pub(crate) use attention::{attention, attention_weights};
pub(crate) use batch_norm::{Affine, moments, normalize};
pub(crate) use cast::cast;
pub(crate) use conv::{Window, conv, max_pool};
pub(crate) use cross_entropy::{Pairs, cross_entropy};
pub(crate) use fork::fork;
pub(crate) use gelu::gelu;
pub(crate) use grid_mean::{grid_mean, scale_channels};
pub(crate) use layer_norm::layer_norm;
pub(crate) use linear::{linear, matmul_transposed};
pub(crate) use log_distance::log_distances;
pub(crate) use mlp::mlp;
pub(crate) use number::Number;
pub(crate) use probs::{balanced, column_sums, exp_rows, largest, sharpness, softmax_rows};
pub(crate) use product::{Start, product_into};
pub(crate) use relu::relu;
pub(crate) use residual::branch;
pub(crate) use seed::seed;
pub(crate) use sequence::sequence;
pub(crate) use shared::SharedGradient;
pub(crate) use unit_rows::unit_rows;
pub(crate) use waves::{wave_sums, weighted_waves};
pub(crate) use weight_norm::weight_norm_linear;

#[cfg(test)]
pub(crate) use gemm::count::flops_of;

use burn_tensor::{DType, Tensor};

/// `x` in f32, if it has fewer bits. Tests compute in f64.
pub(crate) fn in_f32<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    match x.dtype() {
        DType::F32 | DType::F64 => x,
        _ => cast(x, DType::F32),
    }
}

#[cfg(test)]
pub(crate) mod twin {
    //! Compares an operation with its composition of Burn operations, forwards and backwards.

    use burn_tensor::{DType, Device, Distribution, Tensor};

    /// The CPU, and what the features of this build bring.
    pub(crate) fn devices() -> Vec<Device> {
        #[allow(unused_mut)]
        let mut devices = vec![Device::flex()];
        #[cfg(feature = "wgpu")]
        devices.push(Device::wgpu(Default::default()));
        #[cfg(feature = "cuda")]
        if crate::device::cuda_devices().is_ok_and(|found| !found.is_empty()) {
            devices.push(Device::cuda(0));
        }
        devices
    }

    /// What `device` computes in, and how far apart results may be: `tolerance` in f32, a few roundings in bf16.
    pub(crate) fn types(device: &Device, tolerance: f32) -> Vec<(DType, f32)> {
        let types = [(DType::F32, tolerance), (DType::BF16, 2e-2)];
        types.into_iter().filter(|(dtype, _)| device.supports_dtype(*dtype)).collect()
    }

    /// Inputs for `shapes`, as leaves that want a gradient.
    pub(crate) fn leaves<const D: usize>(
        device: &Device,
        shapes: &[[usize; D]],
        seed: u64,
    ) -> Vec<Tensor<D>> {
        device.seed(seed);
        shapes
            .iter()
            .map(|shape| {
                Tensor::random(*shape, Distribution::Normal(0.0, 1.0), device).autodiff().require_grad()
            })
            .collect()
    }

    /// Asserts that two tensors agree to `tolerance` of the largest value.
    pub(crate) fn assert_close<const D: usize>(name: &str, a: Tensor<D>, b: Tensor<D>, tolerance: f32) {
        let [a, b] = [a, b].map(super::in_f32);
        let scale = b.clone().abs().max().into_scalar::<f32>().max(1e-6);
        let gap = (a - b).abs();
        // A largest value may pass over what is not a number; a sum does not.
        assert!(gap.clone().sum().into_scalar::<f32>().is_finite(), "{name}: not finite");
        let worst = gap.max().into_scalar::<f32>();
        assert!(worst <= tolerance * scale, "{name}: {worst} against a scale of {scale}");
    }
}
