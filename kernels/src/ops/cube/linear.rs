//! [`linear`](crate::ops::linear) with the device's own matrix products, on rows at any stride.
//! Burn's operations copy padded rows when they merge images and tokens into one dimension.
//!
//! ```text
//! y  = x · Wᵀ + b     x [.., D]   W [O, D]   b [O]   y [.., O]
//! gx = g · W          gW = gᵀ · x   gb = Σ_rows g, in f32
//! ```

use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::zspace::metadata::Metadata;

use super::column_sums::column_sums;
use super::product::{add_weight_gradient, affine, product};
use super::{Rows, cast, transposed};
use crate::ops::bridge::Kernel;
use crate::ops::places::GradientPlace;

/// Kernels of the forward and backward pass.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Linear;

impl Kernel<CubeBackend, 3> for Linear {
    /// The input, and W.
    type Saved = (CubeTensor, CubeTensor);

    fn forward(&self, [x, weight, bias]: [CubeTensor; 3]) -> (CubeTensor, Self::Saved) {
        let mut shape = x.meta.shape().clone();
        let last = shape.num_dims() - 1;
        shape[last] = weight.meta.shape()[0];
        let y = affine(matrix(&x), weight.clone(), bias);
        (CubeBackend::float_reshape(y, shape), (x, weight))
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

    /// Adds the gradients of weight and bias to their places, if they have one.
    fn backward_to(
        &self,
        (x, weight): Self::Saved,
        grad: CubeTensor,
        wanted: [bool; 3],
        places: [Option<GradientPlace>; 3],
    ) -> [Option<CubeTensor>; 3] {
        let [_, weight_place, bias_place] = places;
        if weight_place.is_some() || bias_place.is_some() {
            add_weight_gradient(&matrix(&grad), &matrix(&x), weight_place.as_ref(), bias_place.as_ref());
        }
        let wanted = [wanted[0], wanted[1] && weight_place.is_none(), wanted[2] && bias_place.is_none()];
        self.backward((x, weight), grad, wanted)
    }
}

/// Returns a view of the rows as a matrix, `[rows, D]`.
fn matrix(tensor: &CubeTensor) -> CubeTensor {
    let Rows { mut tensor, n_rows, d, stride } = Rows::new(tensor);
    *tensor.meta = Metadata::new([n_rows, d], [stride, 1]);
    tensor
}
