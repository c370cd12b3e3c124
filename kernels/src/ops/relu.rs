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

/// Returns `max(x, 0)`, element by element.
pub fn relu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
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

/// Rectifies `values` in place; NaN is unchanged.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn rectify(values: &mut [f32]) {
    for value in values {
        *value = rectified(*value);
    }
}

/// Returns `value`, or zero if it is negative.
#[inline(always)]
pub(super) fn rectified(value: f32) -> f32 {
    if value < 0.0 { 0.0 } else { value }
}

/// Sets `grad` to zero where `y` is not positive.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub(super) fn mask<T: Number>(grad: &mut [T], y: &[T]) {
    for (grad, y) in grad.iter_mut().zip(y) {
        *grad = if y.wide() > 0.0 { *grad } else { T::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, assert_gradients_close, backward, devices, leaves};

    #[test]
    fn matches_burns_relu_forward_and_backward() {
        for device in devices() {
            let x = leaves(&device, &[[3, 5, 37]], 1).remove(0);
            let y = relu(x.clone());
            let expected = burn_tensor::activation::relu(x.clone());
            assert_close("forward", y.clone().inner(), expected.clone().inner(), 0.0);
            assert_gradients_close("input", &x, &backward(y), &backward(expected), 0.0);
        }
    }
}
