//! Column sums, which are gradients of biases.
//!
//! ```text
//! sums[c] = Σ_rows x[row, c]       in f32, block by block of rows
//! ```

use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::DType;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::{Rows, elem, empty, one_unit_each, vector_size};

/// Number of rows of a block.
const BLOCK: usize = 64;

/// Returns the sum of all rows, `[D]` in f32, from sums over blocks of rows.
pub(super) fn column_sums(tensor: &CubeTensor) -> CubeTensor {
    let rows = Rows::new(tensor);
    let n_blocks = rows.n_rows.div_ceil(BLOCK);
    let partial = Rows::new(&empty(tensor, [n_blocks, rows.d], DType::F32));
    // At most four bytes per read: with wider reads there would be too few units.
    let n = vector_size(&[&rows, &partial]).min((4 / tensor.dtype.size()).max(1));
    let client = &tensor.client;
    let (count, dim) = one_unit_each(client, n_blocks * rows.d / n);
    block_sums::launch(
        client,
        count,
        dim,
        n,
        rows.arg(),
        partial.arg(),
        rows.stride / n,
        rows.n_rows,
        rows.d / n,
        elem(tensor),
    );
    CubeBackend::float_reshape(CubeBackend::float_sum_dim(partial.tensor, 0), [rows.d].into())
}

/// Sums blocks of rows: a unit sums some columns of one block.
#[cube(launch)]
fn block_sums<F: Float, N: Size>(
    rows: &[Vector<F, N>],
    sums: &mut [Vector<f32, N>],
    stride: usize,
    n_rows: usize,
    #[comptime] n_vectors: usize,
    #[define(F)] _dtype: ElemType,
) {
    let block = ABSOLUTE_POS / n_vectors;
    let column = ABSOLUTE_POS % n_vectors;
    let first = block * BLOCK;
    if first < n_rows {
        let mut total = Vector::<f32, N>::new(0.0f32);
        for row in first..min(first + BLOCK, n_rows) {
            total += Vector::cast_from(rows[row * stride + column]);
        }
        sums[block * n_vectors + column] = total;
    }
}
