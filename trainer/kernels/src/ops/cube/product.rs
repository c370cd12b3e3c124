//! Matrix products with one kernel for each kind of size.
//!
//! Burn's own product tries up to thirty kernels for each size that it has not met before, and keeps the fastest. On an NVIDIA
//! GPU each is compiled first: for the sizes of one step of ViT-S/16, NVIDIA's compiler takes 16 minutes, two of
//! them for a single kernel. What a stopwatch chooses also differs between runs, and with it the last bits of results.
//!
//! ```text
//! C = A · B     A [.., M, K]   B [.., K, N]   C [.., M, N]
//! gA = g · Bᵀ   gB = Aᵀ · g
//! ```

use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::config::autotune::AutotuneLevel;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};

use super::launch::launch;
use super::parts::{n_parts, product_in_parts};
use crate::ops::bridge::Kernel;

/// The product as an operation, forwards and backwards. All dimensions before the last two are equal.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Matmul;

impl Kernel<CubeBackend, 2> for Matmul {
    /// Both factors.
    type Saved = (CubeTensor, CubeTensor);

    fn forward(&self, [a, b]: [CubeTensor; 2]) -> (CubeTensor, Self::Saved) {
        (product(a.clone(), b.clone()), (a, b))
    }

    fn backward(&self, (a, b): Self::Saved, grad: CubeTensor, wanted: [bool; 2]) -> [Option<CubeTensor>; 2] {
        let ga = wanted[0].then(|| product(grad.clone(), transposed(b)));
        let gb = wanted[1].then(|| product(transposed(a), grad));
        [ga, gb]
    }
}

/// Returns the matrices of `[.., M, N]` transposed, as a view.
pub(super) fn transposed(matrices: CubeTensor) -> CubeTensor {
    let rank = matrices.meta.num_dims();
    CubeBackend::float_swap_dims(matrices, rank - 2, rank - 1)
}

/// Returns `a · b`, `[.., M, N]`, in the type of `a`.
pub(super) fn product(a: CubeTensor, b: CubeTensor) -> CubeTensor {
    // A higher level of tuning asks for Burn's product, which tries many kernels.
    if matches!(CubeClRuntimeConfig::get().autotune.level, AutotuneLevel::Minimal) {
        let in_parts = n_parts(&a, &b).and_then(|n_parts| product_in_parts(&a, &b, n_parts));
        if let Some(out) = in_parts.or_else(|| launch(&a, &b, a.dtype)) {
            return out;
        }
    }
    // Also for a device without matrix instructions.
    CubeBackend::float_matmul(a, b)
}
