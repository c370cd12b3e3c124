//! Gradients of weights whose sum over tokens is divided, so that all of a GPU's multiprocessors
//! have work.
//!
//! ```text
//! C = Σ_s A[:, s] · B[s, :]       A [M, K]   B [K, N]   s one of S equal parts of K       C [M, N]
//! ```
//!
//! The gradient of a weight has few rows and columns, and sums over all tokens of a batch: in
//! ViT-S/16, that of the projection after attention is 18 tiles for the 132 multiprocessors of an
//! H200. Parts are added in f32.

use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::DType;
use cubecl::zspace::metadata::Metadata;

use super::cast;
use super::launch::launch;

/// Rows and columns of the result that a block of threads computes, for factors of 16 bits whose
/// neighbors in memory are neighbors along K. CubeCL halves both for other factors, and halves them
/// again for f32.
const TILE: [usize; 2] = [256, 128];
/// Largest number of parts.
const MOST_PARTS: usize = 16;
/// Fewest terms of a part.
const FEWEST_TERMS: usize = 256;
/// Operations in bf16 that a GPU computes in the time in which it moves a byte: on an H200, 232
/// TFLOP/s and about 4 TB/s.
const FLOPS_PER_BYTE: f64 = 58.0;

/// Returns the number of parts that the product of two matrices is computed in; `None` for one
/// part.
///
/// Only products of a transposed matrix and a matrix are divided. CubeCL copies parts of any
/// others.
pub(super) fn n_parts(a: &CubeTensor, b: &CubeTensor) -> Option<usize> {
    let n_processors = a.client.properties().hardware.num_streaming_multiprocessors? as usize;
    let are_matrices = a.meta.num_dims() == 2 && b.meta.num_dims() == 2;
    if !are_matrices || a.meta.strides()[0] != 1 || b.meta.strides()[1] != 1 {
        return None;
    }
    let [m, k] = [a.meta.shape()[0], a.meta.shape()[1]];
    let n_parts = fastest([m, k, b.meta.shape()[1]], a.dtype.size(), n_processors);
    (n_parts > 1).then_some(n_parts)
}

/// Returns `a · b`, `[M, N]` in `dtype`, from products of parts of K; `None` if the device has no
/// matrix instructions for these types and sizes.
pub(super) fn product_in_parts(
    a: &CubeTensor,
    b: &CubeTensor,
    n_parts: usize,
    dtype: DType,
) -> Option<CubeTensor> {
    let m = a.meta.shape()[0];
    let k = a.meta.shape()[1];
    let n = b.meta.shape()[1];
    let terms = k / n_parts;
    let [a_parts, b_parts] = [
        view(a, n_parts, [m, terms], terms * a.meta.strides()[1]),
        view(b, n_parts, [terms, n], terms * b.meta.strides()[0]),
    ];
    let products = launch(&a_parts, &b_parts, DType::F32)?;
    let sum = CubeBackend::float_sum_dim(products, 0);
    Some(cast(CubeBackend::float_reshape(sum, [m, n].into()), dtype))
}

/// Returns parts of a matrix, `[S, ..shape]`, each `stride` elements after the one before, without
/// a copy.
fn view(matrix: &CubeTensor, n_parts: usize, shape: [usize; 2], stride: usize) -> CubeTensor {
    let strides = [stride, matrix.meta.strides()[0], matrix.meta.strides()[1]];
    let mut parts = matrix.clone();
    *parts.meta = Metadata::new([n_parts, shape[0], shape[1]], strides);
    parts
}

/// Returns the number of parts with which an `[M, K] · [K, N]` product of a transposed matrix and a
/// matrix is the fastest, for elements of `n_bytes`.
///
/// All multiprocessors compute tiles in rounds, the last of which may leave some without work.
/// Results of parts are written and read once in f32.
fn fastest([m, k, n]: [usize; 3], n_bytes: usize, n_processors: usize) -> usize {
    let is_f32 = n_bytes == 4;
    let tile = TILE.map(|length| length / if is_f32 { 4 } else { 2 });
    let flops_per_byte = if is_f32 { FLOPS_PER_BYTE / 2.0 } else { FLOPS_PER_BYTE };
    let n_tiles = m.div_ceil(tile[0]) * n.div_ceil(tile[1]);
    let flops = |n_parts: usize| {
        let n_rounds = (n_tiles * n_parts).div_ceil(n_processors);
        let of_products = (n_rounds * n_processors * 2 * tile[0] * tile[1]) as f64 * (k / n_parts) as f64;
        let n_moved_bytes = if n_parts > 1 { 8 * n_parts * m * n } else { 0 };
        of_products + n_moved_bytes as f64 * flops_per_byte
    };
    // Parts of a multiple of eight terms: rows of both factors stay aligned.
    let n_parts =
        (2..=MOST_PARTS).filter(|n_parts| k.is_multiple_of(n_parts * 8) && k / n_parts >= FEWEST_TERMS);
    std::iter::once(1).chain(n_parts).min_by(|x, y| flops(*x).total_cmp(&flops(*y))).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use burn_tensor::Tensor;

    use super::*;
    use crate::ops::cube::is_cube;
    use crate::ops::cube::transposed;
    use crate::ops::twin::{assert_close, devices, leaves};

    /// Sizes of ViT-S/16's and ViT-B/16's steps on an H200.
    #[test]
    fn gradients_of_small_weights_are_divided() {
        let n_tokens = 128 * 197;
        assert_eq!(fastest([384, n_tokens, 384], 2, 132), 16);
        assert_eq!(fastest([1536, n_tokens, 384], 2, 132), 16);
        assert_eq!(fastest([3072, n_tokens, 768], 2, 132), 4);
        for whole in [[65_536, 640, 256], [8192, 8192, 8192]] {
            assert_eq!(fastest(whole, 4, 132), 1, "{whole:?}");
        }
        // No part of 25,217 terms is a multiple of eight.
        assert_eq!(fastest([384, n_tokens + 1, 384], 2, 132), 1);
    }

    /// Rows of the factors are further apart than they are long, as in a padded allocation.
    #[test]
    fn parts_add_up_to_the_whole() {
        for device in devices() {
            let [a, b] = [96, 40].map(|d| {
                let wide = leaves(&device, &[[2048, 128]], d as u64).remove(0).inner();
                wide.slice([0..2048, 0..d])
            });
            if !is_cube(&a) {
                continue;
            }
            let primitive = |x: &Tensor<2>| x.clone().try_into_primitive::<CubeBackend>().unwrap();
            let Some(sum) = product_in_parts(&transposed(primitive(&a)), &primitive(&b), 8, DType::F32)
            else {
                continue;
            };
            let whole = a.transpose().matmul(b);
            // Matrix instructions take f32 as TF32.
            assert_close("product", Tensor::<2>::from_primitive::<CubeBackend>(sum), whole, 1e-2);
        }
    }
}
