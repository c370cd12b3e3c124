//! Operations that start a backward pass with given gradients: see [`seed`](crate::ops::seed) and
//! [`add_seeds`](crate::ops::add_seeds).

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::DType;

use super::empty;
use crate::ops::bridge::Kernel;

/// Returns an uninitialized number, whose gradient at the input is `g`.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Seed {
    /// Gradient at the input.
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

/// Returns an uninitialized number, which passes its gradient to both inputs.
#[derive(Debug, Clone)]
pub(in crate::ops) struct AddSeeds;

impl Kernel<CubeBackend, 2> for AddSeeds {
    type Saved = ();

    fn forward(&self, [a, _]: [CubeTensor; 2]) -> (CubeTensor, ()) {
        (empty(&a, [1], DType::F32), ())
    }

    fn backward(&self, (): (), grad: CubeTensor, _: [bool; 2]) -> [Option<CubeTensor>; 2] {
        [Some(grad.clone()), Some(grad)]
    }
}
