//! Tensors that are used several times, whose gradients are summed in f32.
//!
//! ```text
//! y_i = x          gx = Σ_i gy_i          summed in f32, in the order of the backward pass
//! ```
//!
//! Autodiff sums such gradients as well, but in the type of `x`, and on the CPU in a loop that is
//! not optimized.

use std::sync::{Arc, Mutex, PoisonError};

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, Tensor};

use super::bridge::{Kernel, run};
use super::cast::cast;
use super::cpu::{flex_dtype, owned};
use crate::device::host;

/// The sum of the gradients of all uses of a tensor.
#[derive(Debug, Clone, Default)]
pub struct SharedGradient(Sum);

/// The first gradient, to which the others are added in place. Gradients live until the end of the
/// backward pass, so a copy would increase the peak memory.
type Sum = Arc<Mutex<Option<Tensor<1>>>>;

impl SharedGradient {
    /// Returns `x`, which is f32 or bf16, in `dtype`, and registers it as one more use. If autodiff
    /// tracks `x` on the CPU, [`SharedGradient::take`] returns the gradient after the backward
    /// pass, in f32; otherwise it is among autodiff's gradients.
    ///
    /// On the CPU, the backward pass adds the gradient of this use before it reaches the operations
    /// that compute `input`. Without `input` it would add it at the end, because it processes
    /// operations in the order of their distance from the leaves, and the gradients of all uses of
    /// all tensors would be in memory until then.
    pub fn register<const D: usize>(
        &self,
        x: &Tensor<1>,
        dtype: DType,
        input: Option<&Tensor<D>>,
    ) -> Tensor<1> {
        if !x.is_autodiff() {
            return cast(x.clone(), dtype);
        }
        let kernel = Use { sum: Arc::clone(&self.0), dtype };
        match (flex_dtype(x), x.dtype(), input) {
            (Some(_), DType::F32 | DType::BF16, None) => run::<Flex, _, 1, 1>(kernel, [x.clone().into()]),
            (Some(_), DType::F32 | DType::BF16, Some(input)) => {
                run::<Flex, _, 2, 1>(kernel, [x.clone().into(), input.clone().into()])
            }
            _ => cast(x.clone(), dtype),
        }
    }

    /// Takes the sum; `None` if no gradient was added to it.
    pub fn take(&self) -> Option<Tensor<1>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[derive(Debug, Clone)]
struct Use {
    sum: Sum,
    dtype: DType,
}

impl Use {
    fn add(&self, grad: Tensor<1>) {
        let mut sum = self.sum.lock().unwrap_or_else(PoisonError::into_inner);
        *sum = Some(match sum.take() {
            Some(sum) => host::add(sum, grad),
            None => grad,
        });
    }
}

/// The inputs are the tensor and, optionally, one that determines when the gradient is added.
impl<const N: usize> Kernel<Flex, N> for Use {
    type Saved = ();

    fn forward(&self, inputs: [FlexTensor; N]) -> (FlexTensor, ()) {
        (super::cast::in_dtype(&inputs[0], self.dtype), ())
    }

    fn backward(&self, (): (), grad: FlexTensor, wanted: [bool; N]) -> [Option<FlexTensor>; N] {
        if !wanted[0] {
            return [const { None }; N];
        }
        // An f32 gradient is moved: `owned` would copy it if there were a second reference.
        let grad = if grad.dtype() == DType::F32 { grad } else { super::cast::in_dtype(&grad, DType::F32) };
        self.add(Tensor::from_primitive::<Flex>(owned(grad)));
        [const { None }; N]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::gelu;
    use crate::ops::testing::{assert_close, devices, leaves};

    #[test]
    fn gradients_of_all_uses_are_added() {
        for device in devices() {
            let x = leaves(&device, &[[15]], 1).remove(0);
            let shared = SharedGradient::default();
            let grads = loss(|| shared.register::<2>(&x, DType::F32, None)).backward();
            let sum = shared.take().or_else(|| x.grad(&grads)).unwrap();
            let expected = x.grad(&loss(|| x.clone()).backward()).unwrap();
            assert_close("x", sum, expected, 1e-6);
        }
    }

    /// Returns a number that depends on several uses of a tensor; `x` returns the tensor for each.
    fn loss(x: impl Fn() -> Tensor<1>) -> Tensor<1> {
        // Gradients of concatenated tensors are views into one buffer.
        let pair = Tensor::cat(vec![x(), x() * 2.0], 0);
        gelu(x().unsqueeze::<3>()).sum() + (x() * x()).sum() + pair.powi_scalar(3).sum()
    }

    /// Uses of a tensor in bf16 are summed in f32, whether they read it in bf16 or in f32.
    #[test]
    fn gradients_of_a_bf16_tensor_are_summed_in_f32() {
        for device in devices() {
            if !device.supports_dtype(DType::BF16) {
                continue;
            }
            let x = leaves(&device, &[[15]], 1).remove(0).inner();
            let x = cast(x, DType::BF16).autodiff().require_grad();
            let shared = SharedGradient::default();
            // 1001 and 1002 are not representable in bf16.
            let a = shared.register::<2>(&x, DType::F32, None) * 1000.0;
            let b = shared.register::<2>(&x, DType::F32, None) * 1.0;
            let c = cast(shared.register::<2>(&x, DType::BF16, None) * 1.0, DType::F32);
            let _ = (a.sum() + b.sum() + c.sum()).backward();
            let sum = shared.take().expect("three uses");
            assert_eq!(sum.dtype(), DType::F32);
            assert_close("x", sum, Tensor::full([15], 1002.0, &device), 0.0);
        }
    }

    /// The identity, whose backward pass records whether `sum` holds a gradient.
    #[derive(Debug, Clone)]
    struct Probe {
        sum: Sum,
        holds_gradient: Arc<Mutex<Option<bool>>>,
    }

    impl Kernel<Flex, 1> for Probe {
        type Saved = ();

        fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, ()) {
            (x, ())
        }

        fn backward(&self, (): (), grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
            *self.holds_gradient.lock().unwrap() = Some(self.sum.lock().unwrap().is_some());
            [Some(grad)]
        }
    }

    #[test]
    fn a_gradient_is_added_before_the_backward_pass_reaches_the_input() {
        assert_eq!(holds_gradient_at_input(true), Some(true));
        assert_eq!(holds_gradient_at_input(false), Some(false));
    }

    /// Returns whether the sum held a gradient when the backward pass reached the operation that
    /// computes the input; `passes_input` registers the use with the input.
    fn holds_gradient_at_input(passes_input: bool) -> Option<bool> {
        let device = burn_tensor::Device::flex();
        let x = leaves(&device, &[[2, 3, 4]], 1).remove(0);
        let weight = leaves(&device, &[[24]], 2).remove(0);
        let shared = SharedGradient::default();
        let holds_gradient = Arc::default();
        let probe = Probe { sum: Arc::clone(&shared.0), holds_gradient: Arc::clone(&holds_gradient) };
        let input: Tensor<3> = run::<Flex, _, 1, 3>(probe, [gelu(x).into()]);
        let weight = shared.register(&weight, DType::F32, passes_input.then_some(&input));
        let _ = (input * weight.reshape([2, 3, 4])).sum().backward();
        assert!(shared.take().is_some());
        *holds_gradient.lock().unwrap()
    }
}
