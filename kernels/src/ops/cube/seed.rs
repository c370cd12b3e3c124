//! The start of a backward pass, which computes nothing: see [`seed`](crate::ops::seed) and
//! [`both`](crate::ops::both).

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::DType;

use super::empty;
use crate::ops::bridge::Kernel;

/// Returns a number that means nothing, whose gradient at the input is `g`.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Seed {
    pub(in crate::ops) g: CubeTensor,
}

impl Kernel<CubeBackend, 1> for Seed {
    type Saved = ();

    fn forward(&self, [y]: [CubeTensor; 1]) -> (CubeTensor, ()) {
        (empty(&y, [1], DType::F32), ())
    }

    fn backward(&self, (): (), _: CubeTensor, _: [bool; 1]) -> [Option<CubeTensor>; 1] {
        [Some(self.g.clone())]
    }
}

/// Returns a number that means nothing, whose gradient at both inputs is its own.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Both;

impl Kernel<CubeBackend, 2> for Both {
    type Saved = ();

    fn forward(&self, [a, _]: [CubeTensor; 2]) -> (CubeTensor, ()) {
        (empty(&a, [1], DType::F32), ())
    }

    fn backward(&self, (): (), grad: CubeTensor, _: [bool; 2]) -> [Option<CubeTensor>; 2] {
        [Some(grad.clone()), Some(grad)]
    }
}
