//! Matrix products on a GPU: by cuBLASLt, else by CubeCL's kernels, else by Burn.
//!
//! Burn's own product tries many of CubeCL's kernels for each size that it has not met before, and
//! keeps the fastest. On an NVIDIA GPU each is compiled first: for the sizes of one step of
//! ViT-S/16, NVIDIA's compiler takes 16 minutes, two of them for a single kernel. What a stopwatch
//! chooses also differs between runs, and with it the last bits of results.
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
use super::check::{Beside, Into};
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
    match by_library(&a, &b, &Beside::None, dtype, None) {
        Some(made) => made.out,
        None => without_library(a, b, dtype),
    }
}

/// Returns `x · Wᵀ + b`, `[M, O]`, for `x` of `[M, D]`, `weight` of `[O, D]` and `bias` of `[O]`,
/// all of one type.
pub(super) fn affine(x: CubeTensor, weight: CubeTensor, bias: CubeTensor) -> CubeTensor {
    let [o] = [bias.meta.shape()[0]];
    let weight = transposed(weight);
    let beside = Beside::Bias(bias.clone());
    match by_library(&x, &weight, &beside, x.dtype, None) {
        Some(made) => made.out,
        None => {
            let bias = CubeBackend::float_reshape(bias, [1, o].into());
            let dtype = x.dtype;
            CubeBackend::float_add(without_library(x, weight, dtype), bias)
        }
    }
}

/// Adds `gᵀ · x` to the place of a weight's gradient, and the sums of the rows of `g` to that of a
/// bias, for `g` of `[M, O]` and `x` of `[M, D]`.
pub(super) fn add_weight_gradient(
    g: &CubeTensor,
    x: &CubeTensor,
    weight: Option<&GradientPlace>,
    bias: Option<&GradientPlace>,
) {
    let has_bias = match weight {
        Some(weight) => add_transposed_product(g, x, weight, bias),
        None => false,
    };
    match bias {
        Some(bias) if !has_bias => add_to_place(bias, &column_sums(g)),
        _ => {}
    }
}

/// Adds `gᵀ · x` to the place of a weight's gradient. Returns whether the library has computed the
/// sums of the rows of `g` beside, which are added to the place of `bias` then.
fn add_transposed_product(
    g: &CubeTensor,
    x: &CubeTensor,
    weight: &GradientPlace,
    bias: Option<&GradientPlace>,
) -> bool {
    let gt = transposed(g.clone());
    let [o, d] = [g.meta.shape()[1], x.meta.shape()[1]];
    let place = weight.claim();
    if let Some(out) = part_of(&place, [o, d]) {
        let into = Into { out, adds: place.holds_gradient };
        if let Some(bias) = bias {
            // The library stores the sums, and adds them to nothing.
            let claimed = bias.claim();
            let direct = part_of(&claimed, [1, o]).filter(|_| !claimed.holds_gradient);
            let beside = Beside::Sums { into: direct.clone() };
            if let Some(made) = by_library(&gt, x, &beside, DType::F32, Some(&into)) {
                if let (Some(sums), None) = (made.sums, direct) {
                    add_to_place(bias, &sums);
                }
                return true;
            }
        }
        if by_library(&gt, x, &Beside::None, DType::F32, Some(&into)).is_some() {
            return false;
        }
    }
    add_into(&place.buffer, place.range, &without_library(gt, x.clone(), DType::F32));
    false
}

/// Returns the place of a gradient as a matrix, if the library can write there.
fn part_of(place: &Claimed, shape: [usize; 2]) -> Option<CubeTensor> {
    let size = place.buffer.dtype.size();
    let n_behind = place.buffer.meta.shape()[0] - place.range.end;
    let handle = place.buffer.handle.clone().offset_start((place.range.start * size) as u64);
    let mut part = place.buffer.clone();
    part.handle = handle.offset_end((n_behind * size) as u64);
    *part.meta = Metadata::new(shape, [shape[1], 1]);
    is_writable(&part).then_some(part)
}

#[cfg(feature = "cuda")]
fn is_writable(part: &CubeTensor) -> bool {
    library::is_aligned(part)
}

#[cfg(not(feature = "cuda"))]
fn is_writable(_: &CubeTensor) -> bool {
    false
}

#[cfg(feature = "cuda")]
use library::product as by_library;

/// Returns nothing: this build has no such library.
#[cfg(not(feature = "cuda"))]
fn by_library(
    _: &CubeTensor,
    _: &CubeTensor,
    _: &Beside,
    _: DType,
    _: Option<&Into>,
) -> Option<super::check::Target> {
    None
}

/// Returns `a · b`, `[.., M, N]` in `dtype`, by CubeCL's kernels or by Burn.
fn without_library(a: CubeTensor, b: CubeTensor, dtype: DType) -> CubeTensor {
    // A higher level of tuning asks for Burn's product, which tries many kernels.
    if matches!(CubeClRuntimeConfig::get().autotune.level, AutotuneLevel::Minimal) {
        let in_parts = n_parts(&a, &b).and_then(|n_parts| product_in_parts(&a, &b, n_parts, dtype));
        if let Some(out) = in_parts.or_else(|| launch(&a, &b, dtype)) {
            return out;
        }
    }
    // Also for a device without matrix instructions.
    cast(CubeBackend::float_matmul(a, b), dtype)
}
