//! The start of a backward pass.
//!
//! ```text
//! s = Σ y · g  without computing it       gy = g            y, g of one shape, s [1]
//! ```
//!
//! Autodiff starts from a gradient of one, and only the gradient of the sum is needed: the
//! vector-Jacobian product with `g`.

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, Tensor};

use super::bridge::{Kernel, run};
use super::cpu::{flex_dtype, tensor};
use super::in_f32;

/// Returns a scalar in f32 whose gradient at `y` is `g`, of the type of `y`; its value is
/// unspecified.
pub fn seed<const D: usize>(y: Tensor<D>, g: Tensor<D>) -> Tensor<1> {
    if kernel_supports(&y) && kernel_supports(&g) {
        // Both are tensors of Flex: `flex_dtype` has just tried the same conversion.
        let g = g.try_into_primitive::<Flex>().expect("a tensor of Flex");
        return run(Seed { g }, [y.into()]);
    }
    #[cfg(feature = "cube")]
    if super::cube::is_cube(&y) && super::cube::is_cube(&g) && y.dtype() == g.dtype() {
        // `is_cube` has just tried the same conversion.
        let g = g.try_into_primitive::<burn_cubecl::CubeBackend>().expect("a tensor on a GPU");
        return run(super::cube::Seed { g }, [y.into()]);
    }
    in_f32(y * g.autodiff()).sum()
}

/// Returns whether `tensor` is on the Flex backend in a type that [`Seed`] supports.
fn kernel_supports<const D: usize>(tensor: &Tensor<D>) -> bool {
    matches!(flex_dtype(tensor), Some(DType::F32 | DType::BF16))
}

/// Returns a scalar that passes its gradient to `a` and to `b` unchanged, as their sum does; its
/// value is unspecified.
pub fn add_seeds(a: Tensor<1>, b: Tensor<1>) -> Tensor<1> {
    #[cfg(feature = "cube")]
    if super::cube::is_cube(&a) && super::cube::is_cube(&b) {
        return run(super::cube::AddSeeds, [a.into(), b.into()]);
    }
    a + b
}

#[derive(Debug, Clone)]
struct Seed {
    g: FlexTensor,
}

impl Kernel<Flex, 1> for Seed {
    type Saved = ();

    fn forward(&self, _: [FlexTensor; 1]) -> (FlexTensor, ()) {
        (tensor(vec![0.0f32], [1]), ())
    }

    fn backward(&self, (): (), _: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        [Some(self.g.clone())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::gelu;
    use crate::ops::testing::{assert_close, devices, leaves};

    #[test]
    fn gradient_equals_that_of_a_sum_of_products() {
        for device in devices() {
            let x = leaves(&device, &[[3, 5, 37]], 1).remove(0);
            let g = leaves(&device, &[[3, 5, 37]], 2).remove(0).inner();
            let by_seed = seed(gelu(x.clone()), g.clone()).backward();
            let by_sum = (gelu(x.clone()) * g.autodiff()).sum().backward();
            assert_close("input", x.grad(&by_seed).unwrap(), x.grad(&by_sum).unwrap(), 1e-6);
        }
    }
}
