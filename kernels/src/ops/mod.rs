//! The operations that take most of the training time, each with several implementations.
//!
//! On the CPU backend (Flex), and for some operations on GPUs (`cube`), an operation runs as a
//! kernel with a hand-written backward pass, registered with Burn's autodiff as a single step;
//! `plain` is a composition of Burn's own operations. All implementations of an operation compute
//! the formula at the top of its file, and tests compare them. The kernels exist for speed: under
//! autodiff, Burn's softmax and layer norm take a dozen passes over memory, and copies of permuted
//! tensors cost as much as the products between them.
//!
//! CPU kernels are plain loops, compiled for SSE2, AVX2 and AVX-512 and chosen at run time
//! (`multiversion`). They use no fused multiply-add, except in bf16 products, where it makes no
//! difference, so that all versions give the same bits. Burn's CPU backend is optimized for size
//! only, because optimizing it for speed took a third of a build's time: every expensive operation
//! needs a kernel here, which takes a tensor's slice once, outside its loops.

mod add_term;
mod attention;
mod batch_norm;
mod bilinear;
mod binary_cross_entropy;
mod bridge;
mod cast;
mod conv;
mod cpu;
mod cpu_product;
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
mod lengths;
mod linear;
mod link;
mod log_distance;
mod low_rank;
mod math;
mod mlp;
mod number;
mod part;
mod pixel_cross_entropy;
#[cfg(feature = "cube")]
mod places;
mod probs;
mod relu;
mod residual;
mod rotary;
mod rows;
mod seed;
mod sequence;
mod shared;
mod swiglu;
pub mod tally;
mod threads;
mod total;
mod unit_rows;
mod waves;
mod weight_norm;
mod weights;

pub use add_term::add_term;
pub use attention::{attention, class_attention, keeps_weights};
pub use batch_norm::{Affine, moments, normalize};
pub use bilinear::{Taps, bilinear_taps};
pub use binary_cross_entropy::binary_cross_entropy;
pub use cast::cast;
pub use conv::{Window, conv, max_pool};
pub use cpu_product::{ProductLimits, Start, product_into};
pub use cross_entropy::{Pairs, cross_entropy};
pub use depthwise::depthwise_branch;
pub use fork::fork;
pub use gelu::gelu;
pub use gradient::FlatGradient;
pub use grid_mean::{grid_mean, scale_channels};
pub use kept::{KeptSequences, MIN_SKIPPED_SHARE, SequenceFactors, apply_to_kept};
pub use kernel_choice::{choose_kernels, product_reports, try_products};
pub use layer_norm::layer_norm;
pub use lengths::{Lengths, Run};
pub use linear::{linear, matmul, matmul_transposed};
pub use log_distance::log_distances;
pub use low_rank::{LowRank, LowRankGradients, add_low_rank, low_rank_gradients};
pub use mlp::mlp;
pub use number::Number;
pub use part::part;
pub use pixel_cross_entropy::pixel_cross_entropy;
pub use probs::{
    balanced, column_sums, exp_rows, largest, log_sum_exp, row_maxima, scaled, scaled_row_sums, sharpness,
    softmax_rows,
};
pub use relu::relu;
pub use residual::{BranchNorm, branch};
pub use rotary::{Rotations, UNROTATED, rotate};
pub use rows::{scatter_rows, select_rows};
pub use seed::{add_seeds, seed};
pub use sequence::sequence;
pub use shared::SharedGradient;
pub use swiglu::swiglu;
pub use total::total;
pub use unit_rows::{NORM_EPSILON, unit_rows};
pub use waves::{wave_sums, weighted_waves};
pub use weight_norm::weight_norm_linear;

#[cfg(feature = "testing")]
pub use gemm::count::flops_of;

use burn_tensor::{DType, Tensor};

/// Returns `x`, converted to f32 if its type has fewer bits. f64, which tests use, is unchanged.
pub fn in_f32<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    match x.dtype() {
        DType::F32 | DType::F64 => x,
        _ => cast(x, DType::F32),
    }
}

#[cfg(feature = "testing")]
pub mod testing {
    //! Comparison of an operation with its composition of Burn operations, in the forward and the
    //! backward pass.

    use burn_tensor::{DType, Device, Distribution, Gradients, Tensor};

    /// Returns the CPU, and the GPUs that this build supports and this machine has.
    pub fn devices() -> Vec<Device> {
        #[allow(unused_mut)]
        let mut devices = vec![Device::flex()];
        #[cfg(feature = "wgpu")]
        devices.push(Device::wgpu(Default::default()));
        #[cfg(feature = "cuda")]
        if crate::device::cuda_devices().is_ok_and(|gpus| !gpus.is_empty()) {
            devices.push(Device::cuda(0));
        }
        devices
    }

    /// Returns the types that `device` supports, each with a tolerance: `tolerance` for f32, a few
    /// roundings for bf16.
    pub fn types(device: &Device, tolerance: f32) -> Vec<(DType, f32)> {
        let types = [(DType::F32, tolerance), (DType::BF16, 2e-2)];
        types.into_iter().filter(|(dtype, _)| device.supports_dtype(*dtype)).collect()
    }

    /// Returns random inputs of `shapes`, as leaves that require a gradient.
    pub fn leaves<const D: usize>(device: &Device, shapes: &[[usize; D]], seed: u64) -> Vec<Tensor<D>> {
        device.seed(seed);
        let mut leaves = Vec::with_capacity(shapes.len());
        for shape in shapes {
            let values = Tensor::random(*shape, Distribution::Normal(0.0, 1.0), device);
            leaves.push(values.autodiff().require_grad());
        }
        leaves
    }

    /// Runs the backward pass from `y`, whose own values are its gradient.
    pub fn backward<const D: usize>(y: Tensor<D>) -> Gradients {
        (y.clone() * y.inner().autodiff()).sum().backward()
    }

    /// Asserts that two tensors agree to within `tolerance` times the largest value of `expected`.
    pub fn assert_close<const D: usize>(name: &str, actual: Tensor<D>, expected: Tensor<D>, tolerance: f32) {
        let actual = super::in_f32(actual);
        let expected = super::in_f32(expected);
        let scale = expected.clone().abs().max().into_scalar::<f32>().max(1e-6);
        let gap = (actual - expected).abs();
        // `max` may skip NaN; a sum does not.
        assert!(gap.clone().sum().into_scalar::<f32>().is_finite(), "{name}: not finite");
        let worst = gap.max().into_scalar::<f32>();
        assert!(worst <= tolerance * scale, "{name}: {worst} against a scale of {scale}");
    }

    /// Asserts that both backward passes have a gradient of `leaf`, and that they agree as
    /// [`assert_close`] requires.
    pub fn assert_gradients_close<const D: usize>(
        name: &str,
        leaf: &Tensor<D>,
        actual: &Gradients,
        expected: &Gradients,
        tolerance: f32,
    ) {
        let actual = leaf.grad(actual).expect("a leaf");
        let expected = leaf.grad(expected).expect("a leaf");
        assert_close(name, actual, expected, tolerance);
    }
}
