//! Matrix products whose inner dimension is divided, so that all of a GPU's multiprocessors have work.
//!
//! ```text
//! C = Σ_s A[:, s] · B[s, :]       A [M, K]   B [K, N]   s one of S equal parts of K       C [M, N]
//! ```
//!
//! The gradient of a weight has few rows and columns, and sums over all tokens of a batch: in ViT-S/16, that of a projection is 6 tiles for the 132
//! multiprocessors of an H200. Parts are added in f32, always in the same order.

use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::DType;
use cubecl::zspace::metadata::Metadata;

use super::cast;
use super::launch::launch;

/// Rows and columns of the result that a block of threads computes in bf16.
const TILE: [usize; 2] = [256, 128];
/// Largest number of parts.
const MOST_PARTS: usize = 16;
/// Fewest terms of a part.
const FEWEST_TERMS: usize = 256;
/// Operations that a GPU computes while it moves a byte, measured on an H200: 250 TFLOP/s, 4 TB/s.
const FLOPS_PER_BYTE: f64 = 62.0;

/// Returns the number of parts that the product of two matrices is computed in; `None` for one, and for batches of matrices.
pub(super) fn n_parts(a: &CubeTensor, b: &CubeTensor) -> Option<usize> {
    let n_processors = a.client.properties().hardware.num_streaming_multiprocessors? as usize;
    if a.meta.num_dims() != 2 || b.meta.num_dims() != 2 {
        return None;
    }
    let [m, k] = [a.meta.shape()[0], a.meta.shape()[1]];
    let n_parts = fastest([m, k, b.meta.shape()[1]], n_processors);
    (n_parts > 1).then_some(n_parts)
}

/// Returns `a · b`, `[M, N]`, from products of parts of `K`; `None`, and launches nothing, if the device has no matrix instructions for these
/// types and sizes.
pub(super) fn product_in_parts(a: &CubeTensor, b: &CubeTensor, n_parts: usize) -> Option<CubeTensor> {
    let (m, k, n) = (a.meta.shape()[0], a.meta.shape()[1], b.meta.shape()[1]);
    let terms = k / n_parts;
    let [a_parts, b_parts] = [
        view(a, n_parts, [m, terms], terms * a.meta.strides()[1]),
        view(b, n_parts, [terms, n], terms * b.meta.strides()[0]),
    ];
    let products = launch(&a_parts, &b_parts, DType::F32)?;
    let sum = CubeBackend::float_sum_dim(products, 0);
    Some(cast(CubeBackend::float_reshape(sum, [m, n].into()), a.dtype))
}

/// Returns parts of a matrix, `[S, ..shape]`, each `stride` elements after the one before, without a copy.
fn view(matrix: &CubeTensor, n_parts: usize, shape: [usize; 2], stride: usize) -> CubeTensor {
    let strides = [stride, matrix.meta.strides()[0], matrix.meta.strides()[1]];
    let mut parts = matrix.clone();
    *parts.meta = Metadata::new([n_parts, shape[0], shape[1]], strides);
    parts
}

/// Returns the number of parts with which an `[M, K] · [K, N]` product is the fastest.
///
/// All multiprocessors compute tiles in rounds, the last of which may leave some without work. Results of parts are
/// written and read once in f32.
fn fastest([m, k, n]: [usize; 3], n_processors: usize) -> usize {
    let n_tiles = m.div_ceil(TILE[0]) * n.div_ceil(TILE[1]);
    let flops = |n_parts: usize| {
        let rounds = (n_tiles * n_parts).div_ceil(n_processors);
        let of_products = (rounds * n_processors * 2 * TILE[0] * TILE[1]) as f64 * (k / n_parts) as f64;
        let n_bytes = if n_parts > 1 { 8 * n_parts * m * n } else { 0 };
        of_products + n_bytes as f64 * FLOPS_PER_BYTE
    };
    // Parts of a multiple of eight terms: rows of both factors stay aligned.
    let is_possible = |n_parts: &usize| k.is_multiple_of(n_parts * 8) && k / n_parts >= FEWEST_TERMS;
    let n_parts = (2..=MOST_PARTS).filter(is_possible);
    std::iter::once(1).chain(n_parts).min_by(|x, y| flops(*x).total_cmp(&flops(*y))).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use burn_tensor::Tensor;

    use super::*;
    use crate::ops::cube::is_cube;
    use crate::ops::twin::{assert_close, devices, leaves};

    /// Sizes of ViT-S/16's step on an H200: gradients of weights are divided, products with one row per token are not.
    #[test]
    fn gradients_of_weights_are_divided() {
        let tokens = 128 * 197;
        assert_eq!(fastest([384, tokens, 384], 132), 16);
        assert_eq!(fastest([1536, tokens, 384], 132), 16);
        for whole in [[tokens, 384, 1536], [tokens, 1536, 384], [65_536, 640, 256], [8192, 8192, 8192]] {
            assert_eq!(fastest(whole, 132), 1, "{whole:?}");
        }
        // No part of 25,217 terms is a multiple of eight.
        assert_eq!(fastest([384, tokens + 1, 384], 132), 1);
    }

    #[test]
    fn parts_add_up_to_the_whole() {
        for device in devices() {
            let [a, b] = [[96, 2048], [2048, 40]].map(|shape| leaves(&device, &[shape], 5).remove(0).inner());
            if !is_cube(&a) {
                continue;
            }
            let primitive = |x: &Tensor<2>| x.clone().try_into_primitive::<CubeBackend>().unwrap();
            let transposed = primitive(&b.clone().transpose());
            let turned = super::super::product::transposed(transposed);
            for b_matrix in [primitive(&b), turned] {
                let Some(parts) = product_in_parts(&primitive(&a), &b_matrix, 8) else { continue };
                let sum = Tensor::<2>::from_primitive::<CubeBackend>(parts);
                // Matrix instructions take f32 as TF32.
                assert_close("product", sum, a.clone().matmul(b.clone()), 0.3);
            }
        }
    }
}
