//! Matrix products on a GPU: by cuBLASLt, else by CubeCL's kernels, else by Burn.
//!
//! Burn's own product times many of CubeCL's kernels for each new size, and keeps the fastest. On
//! an NVIDIA GPU each is compiled first: for the sizes of one step of ViT-S/16, NVIDIA's compiler
//! takes 16 minutes, two of them for a single kernel. A choice by timing also differs between runs,
//! and with it the last bits of results.
//!
//! ```text
//! C = A · B     A [.., M, K]   B [.., K, N]   C [.., M, N]
//! gA = g · Bᵀ   gB = Aᵀ · g
//! ```

use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::DType;
use cubecl::config::autotune::AutotuneLevel;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl::zspace::metadata::Metadata;

use super::accumulate::{add_into, add_to_place};
use super::check::{Destination, EpilogueTensor};
use super::column_sums::column_sums;
use super::launch::launch;
#[cfg(feature = "cuda")]
use super::library;
use super::parts::{n_parts, product_in_parts};
use super::{cast, transposed};
use crate::ops::bridge::Kernel;
use crate::ops::places::{Claimed, GradientPlace};

/// The product as an operation, forwards and backwards. All dimensions before the last two are
/// equal.
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

/// Returns `a · b`, `[.., M, N]`, in the type of `a`.
pub(super) fn product(a: CubeTensor, b: CubeTensor) -> CubeTensor {
    let dtype = a.dtype;
    product_in(a, b, dtype)
}

/// Returns `a · b`, `[.., M, N]`, in `dtype`: the type of `a`, or f32.
pub(super) fn product_in(a: CubeTensor, b: CubeTensor, dtype: DType) -> CubeTensor {
    match cublaslt_product(&a, &b, &EpilogueTensor::None, dtype, None) {
        Some(target) => target.out,
        None => fallback_product(a, b, dtype),
    }
}

/// Returns `x · Wᵀ + b`, `[M, O]`, for `x` of `[M, D]`, `weight` of `[O, D]` and `bias` of `[O]`,
/// all of one type.
pub(super) fn affine(x: CubeTensor, weight: CubeTensor, bias: CubeTensor) -> CubeTensor {
    let o = bias.meta.shape()[0];
    let dtype = x.dtype;
    let weight = transposed(weight);
    let epilogue = EpilogueTensor::Bias(bias.clone());
    if let Some(target) = cublaslt_product(&x, &weight, &epilogue, dtype, None) {
        return target.out;
    }
    let bias = CubeBackend::float_reshape(bias, [1, o].into());
    CubeBackend::float_add(fallback_product(x, weight, dtype), bias)
}

/// Adds `gᵀ · x` to the gradient of a weight, and the column sums of `g` to the gradient of a bias,
/// at their places, for `g` of `[M, O]` and `x` of `[M, D]`.
pub(super) fn add_weight_gradient(
    g: &CubeTensor,
    x: &CubeTensor,
    weight: Option<&GradientPlace>,
    bias: Option<&GradientPlace>,
) {
    let has_added_bias = match weight {
        Some(weight) => add_transposed_product(g, x, weight, bias),
        None => false,
    };
    if let Some(bias) = bias
        && !has_added_bias
    {
        add_to_place(bias, &column_sums(g));
    }
}

/// Adds `gᵀ · x` to the gradient of a weight, at its place. If the library computes the column sums
/// of `g` with the product, adds them to the gradient of `bias`, and returns true.
fn add_transposed_product(
    g: &CubeTensor,
    x: &CubeTensor,
    weight: &GradientPlace,
    bias: Option<&GradientPlace>,
) -> bool {
    let gt = transposed(g.clone());
    let o = g.meta.shape()[1];
    let d = x.meta.shape()[1];
    let place = weight.claim();
    if let Some(out) = place_as_matrix(&place, [o, d]) {
        let destination = Destination { out, adds: place.holds_gradient };
        if let Some(bias) = bias {
            // The library can store the sums, but not add them to an earlier gradient.
            let bias_place = bias.claim();
            let bias_out =
                if bias_place.holds_gradient { None } else { place_as_matrix(&bias_place, [1, o]) };
            let is_stored = bias_out.is_some();
            let epilogue = EpilogueTensor::Sums { out: bias_out };
            if let Some(target) = cublaslt_product(&gt, x, &epilogue, DType::F32, Some(&destination)) {
                if let Some(sums) = target.sums
                    && !is_stored
                {
                    add_to_place(bias, &sums);
                }
                return true;
            }
        }
        if cublaslt_product(&gt, x, &EpilogueTensor::None, DType::F32, Some(&destination)).is_some() {
            return false;
        }
    }
    add_into(&place.buffer, place.range, &fallback_product(gt, x.clone(), DType::F32));
    false
}

/// Returns a view of the place of a gradient as a matrix, if the library can write to it.
fn place_as_matrix(place: &Claimed, shape: [usize; 2]) -> Option<CubeTensor> {
    let size = place.buffer.dtype.size();
    let n_after = place.buffer.meta.shape()[0] - place.range.end;
    let handle = place.buffer.handle.clone().offset_start((place.range.start * size) as u64);
    let mut matrix = place.buffer.clone();
    matrix.handle = handle.offset_end((n_after * size) as u64);
    *matrix.meta = Metadata::new(shape, [shape[1], 1]);
    if is_writable(&matrix) { Some(matrix) } else { None }
}

#[cfg(feature = "cuda")]
fn is_writable(matrix: &CubeTensor) -> bool {
    library::is_aligned(matrix)
}

#[cfg(not(feature = "cuda"))]
fn is_writable(_: &CubeTensor) -> bool {
    false
}

#[cfg(feature = "cuda")]
use library::product as cublaslt_product;

/// Returns `None`, because this build does not support the library.
#[cfg(not(feature = "cuda"))]
fn cublaslt_product(
    _: &CubeTensor,
    _: &CubeTensor,
    _: &EpilogueTensor,
    _: DType,
    _: Option<&Destination>,
) -> Option<super::check::Target> {
    None
}

/// Returns `a · b`, `[.., M, N]` in `dtype`, by CubeCL's kernels or by Burn.
fn fallback_product(a: CubeTensor, b: CubeTensor, dtype: DType) -> CubeTensor {
    // Higher levels of autotuning request Burn's product, which times many kernels.
    if matches!(CubeClRuntimeConfig::get().autotune.level, AutotuneLevel::Minimal) {
        if let Some(n_parts) = n_parts(&a, &b)
            && let Some(out) = product_in_parts(&a, &b, n_parts, dtype)
        {
            return out;
        }
        if let Some(out) = launch(&a, &b, dtype) {
            return out;
        }
    }
    // Devices without matrix instructions get here as well.
    cast(CubeBackend::float_matmul(a, b), dtype)
}
