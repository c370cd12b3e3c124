//! [`linear`](crate::ops::linear) with the device's own matrix products, on rows at any stride. Burn's operations
//! copy padded rows when they merge images and tokens into one dimension.
//!
//! ```text
//! y  = x · Wᵀ + b     x [B, N, D]   W [O, D]   b [O]   y [B, N, O]
//! gx = g · W          gW = gᵀ · x   gb = Σ_rows g, in f32
//! ```

use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::DType;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::zspace::metadata::Metadata;

use super::product::{add_weight_gradient, affine, product, transposed};
use super::{Rows, cast, elem, empty, one_unit_each, vector_size};
use crate::ops::bridge::Kernel;
use crate::ops::places::GradientPlace;

/// Rows that are summed together.
const BLOCK: usize = 64;

/// The operation's kernels, forwards and backwards.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Linear;

impl Kernel<CubeBackend, 3> for Linear {
    /// The input, and W.
    type Saved = (CubeTensor, CubeTensor);

    fn forward(&self, [x, weight, bias]: [CubeTensor; 3]) -> (CubeTensor, Self::Saved) {
        let shape = [x.meta.shape()[0], x.meta.shape()[1], weight.meta.shape()[0]];
        let y = affine(matrix(&x), weight.clone(), bias);
        (CubeBackend::float_reshape(y, shape.into()), (x, weight))
    }

    fn backward(
        &self,
        (x, weight): Self::Saved,
        grad: CubeTensor,
        wanted: [bool; 3],
    ) -> [Option<CubeTensor>; 3] {
        let g = matrix(&grad);
        let gx = wanted[0].then(|| {
            let gx = product(g.clone(), weight.clone());
            CubeBackend::float_reshape(gx, x.meta.shape().clone())
        });
        let gw = wanted[1].then(|| product(transposed(g.clone()), matrix(&x)));
        let gb = wanted[2].then(|| cast(column_sums(&grad), weight.dtype));
        [gx, gw, gb]
    }

    /// Adds the gradients of weight and bias to their places, where they have one.
    fn backward_to(
        &self,
        (x, weight): Self::Saved,
        grad: CubeTensor,
        wanted: [bool; 3],
        places: [Option<GradientPlace>; 3],
    ) -> [Option<CubeTensor>; 3] {
        let [_, of_weight, of_bias] = places;
        if of_weight.is_some() || of_bias.is_some() {
            add_weight_gradient(&matrix(&grad), &matrix(&x), of_weight.as_ref(), of_bias.as_ref());
        }
        let wanted = [wanted[0], wanted[1] && of_weight.is_none(), wanted[2] && of_bias.is_none()];
        self.backward((x, weight), grad, wanted)
    }
}

/// Returns the rows as a matrix, `[rows, D]`.
fn matrix(tensor: &CubeTensor) -> CubeTensor {
    let Rows { mut tensor, n_rows, d, stride } = Rows::of(tensor);
    *tensor.meta = Metadata::new([n_rows, d], [stride, 1]);
    tensor
}

/// Returns the sum of all rows, `[D]` in f32, from sums over blocks of rows.
pub(super) fn column_sums(tensor: &CubeTensor) -> CubeTensor {
    let rows = Rows::of(tensor);
    let n_blocks = rows.n_rows.div_ceil(BLOCK);
    let partial = Rows::of(&empty(tensor, [n_blocks, rows.d], DType::F32));
    // At most four bytes per read: wider reads would leave too few units.
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
    let (block, column) = (ABSOLUTE_POS / n_vectors, ABSOLUTE_POS % n_vectors);
    let first = block * BLOCK;
    if first < n_rows {
        let mut total = Vector::<f32, N>::new(0.0f32);
        for row in first..min(first + BLOCK, n_rows) {
            total += Vector::cast_from(rows[row * stride + column]);
        }
        sums[block * n_vectors + column] = total;
    }
}
