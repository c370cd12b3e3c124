//! The rectifier (ReLU).
//!
//! ```text
//! y = max(x, 0)      gx = g where y > 0, else 0
//! ```

use burn_flex::{Flex, FlexTensor};
use burn_tensor::Tensor;
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cpu::{contiguous, is_flex, owned, slice, slice_mut};
use super::number::Number;

/// `max(x, 0)` for `x` of `[B, N, D]`.
pub fn relu(x: Tensor<3>) -> Tensor<3> {
    if is_flex(&x) { run(Relu, [x.into()]) } else { burn_tensor::activation::relu(x) }
}

#[derive(Debug, Clone)]
struct Relu;

impl Kernel<Flex, 1> for Relu {
    type Saved = FlexTensor;

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, FlexTensor) {
        let mut y = owned(x);
        rectify(slice_mut(&mut y));
        (y.clone(), y)
    }

    fn backward(&self, y: FlexTensor, grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let mut gx = owned(grad);
        let y = contiguous(&y);
        mask(slice_mut(&mut gx), slice(&y));
        [Some(gx)]
    }
}

/// Rectifies in place; NaN stays NaN.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn rectify(values: &mut [f32]) {
    for value in values {
        *value = rectified(*value);
    }
}

/// Returns the value, or zero if it is negative.
#[inline(always)]
pub(super) fn rectified(value: f32) -> f32 {
    if value < 0.0 { 0.0 } else { value }
}

/// Sets the gradient to zero where `y` is not positive.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub(super) fn mask<T: Number>(grad: &mut [T], y: &[T]) {
    for (grad, y) in grad.iter_mut().zip(y) {
        *grad = if y.wide() > 0.0 { *grad } else { T::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::twin::{assert_close, devices, leaves};

    #[test]
    fn it_equals_its_twin_forwards_and_backwards() {
        for device in devices() {
            let x = leaves(&device, &[[3, 5, 37]], 1).remove(0);
            let y = relu(x.clone());
            let twin = burn_tensor::activation::relu(x.clone());
            assert_close("forward", y.clone().inner(), twin.clone().inner(), 0.0);
            let gradient = |y: Tensor<3>| {
                let grads = (y.clone() * y.inner().autodiff()).sum().backward();
                x.grad(&grads).expect("leaf")
            };
            assert_close("input", gradient(y), gradient(twin), 0.0);
        }
    }
}
