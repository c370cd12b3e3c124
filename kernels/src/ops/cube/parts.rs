//! Gradients of weights as sums of products of parts of the tokens (split-K), so that all of a
//! GPU's multiprocessors have work.
//!
//! ```text
//! C = Σ_s A[:, s] · B[s, :]       A [M, K]   B [K, N]   C [M, N]   s one of S equal parts of K
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

/// Rows and columns of the result that a block of threads computes, for factors of 16 bits that are
/// contiguous along K. CubeCL halves both for other factors, and halves them again for f32.
const TILE: [usize; 2] = [256, 128];
/// Largest number of parts.
const MOST_PARTS: usize = 16;
/// Fewest terms of a part.
const FEWEST_TERMS: usize = 256;
/// Number of operations in bf16 that a GPU computes in the time of the transfer of one byte: on an
/// H200, 232 TFLOP/s and about 4 TB/s.
const FLOPS_PER_BYTE: f64 = 58.0;

/// Returns the number of parts in which the product of two matrices is computed; `None` if it is
/// not divided.
///
/// Only products of a transposed matrix and a matrix are divided: CubeCL would copy parts of any
/// others.
pub(super) fn n_parts(a: &CubeTensor, b: &CubeTensor) -> Option<usize> {
    let n_processors = a.client.properties().hardware.num_streaming_multiprocessors? as usize;
    let are_matrices = a.meta.num_dims() == 2 && b.meta.num_dims() == 2;
    if !are_matrices || a.meta.strides()[0] != 1 || b.meta.strides()[1] != 1 {
        return None;
    }
    let m = a.meta.shape()[0];
    let k = a.meta.shape()[1];
    let n = b.meta.shape()[1];
    let n_parts = fastest_n_parts([m, k, n], a.dtype.size(), n_processors);
    if n_parts > 1 { Some(n_parts) } else { None }
}

/// Returns `a · b`, `[M, N]` in `dtype`, as the sum of products of parts of K; `None` if the device
/// has no matrix instructions for these types and sizes.
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
    let a_parts = view_parts(a, n_parts, [m, terms], terms * a.meta.strides()[1]);
    let b_parts = view_parts(b, n_parts, [terms, n], terms * b.meta.strides()[0]);
    let products = launch(&a_parts, &b_parts, DType::F32)?;
    let sum = CubeBackend::float_sum_dim(products, 0);
    Some(cast(CubeBackend::float_reshape(sum, [m, n].into()), dtype))
}

/// Returns a view of the parts of a matrix, `[S, ..shape]`, each of which begins `stride` elements
/// after the one before.
fn view_parts(matrix: &CubeTensor, n_parts: usize, shape: [usize; 2], stride: usize) -> CubeTensor {
    let strides = [stride, matrix.meta.strides()[0], matrix.meta.strides()[1]];
    let mut parts = matrix.clone();
    *parts.meta = Metadata::new([n_parts, shape[0], shape[1]], strides);
    parts
}

/// Returns the number of parts that makes an `[M, K] · [K, N]` product of a transposed matrix and a
/// matrix the fastest, for elements of `n_bytes`.
fn fastest_n_parts(dims: [usize; 3], n_bytes: usize, n_processors: usize) -> usize {
    let k = dims[1];
    let mut fastest = 1;
    let mut lowest_cost = cost(dims, n_bytes, n_processors, 1);
    for n_parts in 2..=MOST_PARTS {
        // Parts of a multiple of eight terms keep the rows of both factors aligned.
        if !k.is_multiple_of(n_parts * 8) || k / n_parts < FEWEST_TERMS {
            continue;
        }
        let cost = cost(dims, n_bytes, n_processors, n_parts);
        if cost < lowest_cost {
            fastest = n_parts;
            lowest_cost = cost;
        }
    }
    fastest
}

/// Returns the time of a product in parts, as the number of operations that the GPU can compute in
/// that time.
///
/// All multiprocessors compute tiles in rounds; in the last round, some may have no work. Results
/// of parts are written and read once in f32.
fn cost([m, k, n]: [usize; 3], n_bytes: usize, n_processors: usize, n_parts: usize) -> f64 {
    let is_f32 = n_bytes == 4;
    let tile = TILE.map(|length| length / if is_f32 { 4 } else { 2 });
    let flops_per_byte = if is_f32 { FLOPS_PER_BYTE / 2.0 } else { FLOPS_PER_BYTE };
    let n_tiles = m.div_ceil(tile[0]) * n.div_ceil(tile[1]);
    let n_rounds = (n_tiles * n_parts).div_ceil(n_processors);
    let product_flops = (n_rounds * n_processors * 2 * tile[0] * tile[1]) as f64 * (k / n_parts) as f64;
    let n_moved_bytes = if n_parts > 1 { 8 * n_parts * m * n } else { 0 };
    product_flops + n_moved_bytes as f64 * flops_per_byte
}

#[cfg(test)]
mod tests {
    use burn_tensor::Tensor;

    use super::*;
    use crate::ops::cube::is_cube;
    use crate::ops::cube::transposed;
    use crate::ops::testing::{assert_close, devices, leaves};

    /// Sizes of training steps of ViT-S/16 and ViT-B/16 on an H200.
    #[test]
    fn gradients_of_small_weights_are_divided() {
        let n_tokens = 128 * 197;
        assert_eq!(fastest_n_parts([384, n_tokens, 384], 2, 132), 16);
        assert_eq!(fastest_n_parts([1536, n_tokens, 384], 2, 132), 16);
        assert_eq!(fastest_n_parts([3072, n_tokens, 768], 2, 132), 4);
        for dims in [[65_536, 640, 256], [8192, 8192, 8192]] {
            assert_eq!(fastest_n_parts(dims, 4, 132), 1, "{dims:?}");
        }
        // No part of 25,217 terms is a multiple of eight.
        assert_eq!(fastest_n_parts([384, n_tokens + 1, 384], 2, 132), 1);
    }

    fn primitive(x: &Tensor<2>) -> CubeTensor {
        x.clone().try_into_primitive::<CubeBackend>().unwrap()
    }

    /// The stride of the factors' rows exceeds their length, as in a padded allocation.
    #[test]
    fn product_in_parts_equals_the_undivided_product() {
        for device in devices() {
            let a = leaves(&device, &[[2048, 128]], 96).remove(0).inner().slice([0..2048, 0..96]);
            let b = leaves(&device, &[[2048, 128]], 40).remove(0).inner().slice([0..2048, 0..40]);
            if !is_cube(&a) {
                continue;
            }
            let Some(sum) = product_in_parts(&transposed(primitive(&a)), &primitive(&b), 8, DType::F32)
            else {
                continue;
            };
            let expected = a.transpose().matmul(b);
            // Matrix instructions take f32 as TF32.
            assert_close("product", Tensor::<2>::from_primitive::<CubeBackend>(sum), expected, 1e-2);
        }
    }
}
