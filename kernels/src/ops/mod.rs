//! The operations that take most of the training time, each with several implementations.
//!
//! On the CPU backend (Flex), and for some operations on GPUs (`cube`), an operation runs as a
//! kernel with a hand-written backward pass, registered with Burn's autodiff as a single step;
//! `plain` is a composition of Burn's own operations. All implementations compute the same formula,
//! which is at the top of each file, and tests compare them. The reason for kernels: under
//! autodiff, Burn's softmax and layer norm are a dozen passes over memory, and copies of permuted
//! tensors cost as much as the products between them.

mod attention;
mod batch_norm;
mod bridge;
mod cast;
mod conv;
mod cpu;
mod cross_entropy;
#[cfg(feature = "cube")]
pub mod cube;
mod depthwise;
mod fork;
mod gelu;
pub mod gemm;
mod gradient;
mod grid_mean;
mod kept;
mod kernel_choice;
mod layer_norm;
mod linear;
mod link;
mod log_distance;
mod math;
mod mlp;
mod number;
mod part;
#[cfg(feature = "cube")]
mod places;
mod probs;
mod product;
mod relu;
mod residual;
mod rotary;
mod seed;
mod sequence;
mod shared;
mod swiglu;
pub mod tally;
mod total;
mod unit_rows;
mod waves;
mod weight_norm;
mod weights;

pub use attention::{attention, attention_weights};
pub use batch_norm::{Affine, moments, normalize};
pub use cast::cast;
pub use conv::{Window, conv, max_pool};
pub use cross_entropy::{Pairs, cross_entropy};
pub use depthwise::depthwise_branch;
pub use fork::fork;
pub use gelu::gelu;
pub use gradient::FlatGradient;
pub use grid_mean::{grid_mean, scale_channels};
pub use kept::{SMALLEST_SHARE_LEFT_OUT, on_kept};
pub use kernel_choice::{choose_kernels, product_reports, try_products};
pub use layer_norm::layer_norm;
pub use linear::{linear, matmul, matmul_transposed};
pub use log_distance::log_distances;
pub use mlp::mlp;
pub use number::Number;
pub use part::part;
pub use probs::{
    balanced, column_sums, exp_rows, largest, log_sum_exp, row_maxima, scaled, scaled_row_sums, sharpness,
    softmax_rows,
};
pub use product::{ProductLimits, Start, product_into};
pub use relu::relu;
pub use residual::branch;
pub use rotary::{Rotations, rotate};
pub use seed::{both, seed};
pub use sequence::sequence;
pub use shared::SharedGradient;
pub use swiglu::swiglu;
pub use total::total;
pub use unit_rows::unit_rows;
pub use waves::{wave_sums, weighted_waves};
pub use weight_norm::weight_norm_linear;

#[cfg(feature = "testing")]
pub use gemm::count::flops_of;

use burn_tensor::{DType, Tensor};

/// Returns `x` in f32 if it has fewer bits. f64, which tests compute in, stays.
pub fn in_f32<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    match x.dtype() {
        DType::F32 | DType::F64 => x,
        _ => cast(x, DType::F32),
    }
}

#[cfg(feature = "testing")]
pub mod twin {
    //! Compares an operation with its composition of Burn operations, forwards and backwards.

    use burn_tensor::{DType, Device, Distribution, Tensor};

    /// Returns the CPU and the devices that this build's features add.
    pub fn devices() -> Vec<Device> {
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

    /// Returns the types that `device` computes in with their tolerances: `tolerance` in f32, a few
    /// roundings in bf16.
    pub fn types(device: &Device, tolerance: f32) -> Vec<(DType, f32)> {
        let types = [(DType::F32, tolerance), (DType::BF16, 2e-2)];
        types.into_iter().filter(|(dtype, _)| device.supports_dtype(*dtype)).collect()
    }

    /// Returns random inputs of `shapes`, as leaves that require a gradient.
    pub fn leaves<const D: usize>(device: &Device, shapes: &[[usize; D]], seed: u64) -> Vec<Tensor<D>> {
        device.seed(seed);
        shapes
            .iter()
            .map(|shape| {
                Tensor::random(*shape, Distribution::Normal(0.0, 1.0), device).autodiff().require_grad()
            })
            .collect()
    }

    /// Asserts that two tensors agree to within `tolerance` times the largest value.
    pub fn assert_close<const D: usize>(name: &str, a: Tensor<D>, b: Tensor<D>, tolerance: f32) {
        let [a, b] = [a, b].map(super::in_f32);
        let scale = b.clone().abs().max().into_scalar::<f32>().max(1e-6);
        let gap = (a - b).abs();
        // `max` may skip NaN; a sum does not.
        assert!(gap.clone().sum().into_scalar::<f32>().is_finite(), "{name}: not finite");
        let worst = gap.max().into_scalar::<f32>();
        assert!(worst <= tolerance * scale, "{name}: {worst} against a scale of {scale}");
    }
}
