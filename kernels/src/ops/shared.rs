//! Tensors that are used several times.
//!
//! ```text
//! y_i = x          gx = Σ_i gy_i          summed in f32, in the order of the backward pass
//! ```
//!
//! Autodiff adds such gradients too, but in the type of `x`, and on the CPU with a loop that is not
//! optimized.

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

/// First gradient, to which the others are added in place. Gradients live until the end of the
/// backward pass: a copy would add to the peak memory.
type Sum = Arc<Mutex<Option<Tensor<1>>>>;

impl SharedGradient {
    /// Returns `x`, which is f32 or bf16, in `dtype` for one more use. Under autodiff on the CPU,
    /// [`SharedGradient::take`] returns its gradient after the backward pass, in f32; else it is
    /// among autodiff's gradients.
    ///
    /// On the CPU, the backward pass adds the gradient of this use before it comes to the
    /// operations that `input` is a result of. By itself it would do so at its end, because it goes
    /// through the operations in the order of their distance from its leaves: until then, the
    /// gradients of all uses of all tensors would be held.
    pub fn of(&self, x: &Tensor<1>, dtype: DType, input: Option<&Tensor<3>>) -> Tensor<1> {
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

    /// Takes the sum; `None` if no gradient was added here.
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

/// Inputs are the tensor, and one that decides when the gradient is added.
impl<const N: usize> Kernel<Flex, N> for Use {
    type Saved = ();

    fn forward(&self, inputs: [FlexTensor; N]) -> (FlexTensor, ()) {
        (super::cast::in_dtype(&inputs[0], self.dtype), ())
    }

    fn backward(&self, (): (), grad: FlexTensor, wanted: [bool; N]) -> [Option<FlexTensor>; N] {
        if !wanted[0] {
            return [const { None }; N];
        }
        // Moved where it is f32: a second reference would make `owned` copy it.
        let grad = if grad.dtype() == DType::F32 { grad } else { super::cast::in_dtype(&grad, DType::F32) };
        self.add(Tensor::from_primitive::<Flex>(owned(grad)));
        [const { None }; N]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::gelu;
    use crate::ops::twin::{assert_close, devices, leaves};

    #[test]
    fn gradients_of_all_uses_are_added() {
        for device in devices() {
            let x = leaves(&device, &[[15]], 1).remove(0);
            let uses = |get: &dyn Fn() -> Tensor<1>| {
                // Gradients of concatenated tensors are views into one buffer.
                let pair = Tensor::cat(vec![get(), get() * 2.0], 0);
                (gelu(get().unsqueeze::<3>()).sum() + (get() * get()).sum() + pair.powi_scalar(3).sum())
                    .backward()
            };
            let shared = SharedGradient::default();
            let grads = uses(&|| shared.of(&x, DType::F32, None));
            let sum = shared.take().or_else(|| x.grad(&grads)).unwrap();
            assert_close("x", sum, x.grad(&uses(&|| x.clone())).unwrap(), 1e-6);
        }
    }

    /// Uses of a tensor in bf16 are summed in f32, whether they read it as it is or in f32.
    #[test]
    fn gradients_of_a_narrow_tensor_are_summed_in_f32() {
        for device in devices().iter().filter(|device| device.supports_dtype(DType::BF16)) {
            let x = cast(leaves(device, &[[15]], 1).remove(0).inner(), DType::BF16).autodiff().require_grad();
            let shared = SharedGradient::default();
            // A thousand and one are not a number of bf16.
            let terms = [(DType::F32, 1000.0), (DType::F32, 1.0), (DType::BF16, 1.0)];
            let uses =
                terms.map(|(dtype, factor)| cast(shared.of(&x, dtype, None) * factor, DType::F32).sum());
            let [a, b, c] = uses;
            let _ = (a + b + c).backward();
            let sum = shared.take().expect("three uses");
            assert_eq!(sum.dtype(), DType::F32);
            assert_close("x", sum, Tensor::full([15], 1002.0, device), 0.0);
        }
    }

    /// The identity, whose backward pass notes whether a sum has a gradient.
    #[derive(Debug, Clone)]
    struct Note(Sum, Arc<Mutex<Option<bool>>>);

    impl Kernel<Flex, 1> for Note {
        type Saved = ();

        fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, ()) {
            (x, ())
        }

        fn backward(&self, (): (), grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
            *self.1.lock().unwrap() = Some(self.0.lock().unwrap().is_some());
            [Some(grad)]
        }
    }

    #[test]
    fn a_gradient_is_added_before_the_backward_pass_comes_to_the_input() {
        let device = burn_tensor::Device::flex();
        let noted = |is_told: bool| {
            let x = leaves(&device, &[[2, 3, 4]], 1).remove(0);
            let weight = leaves(&device, &[[24]], 2).remove(0);
            let shared = SharedGradient::default();
            let noted = Arc::default();
            let below = gelu(x);
            let input: Tensor<3> =
                run::<Flex, _, 1, 3>(Note(Arc::clone(&shared.0), Arc::clone(&noted)), [below.into()]);
            let weight = shared.of(&weight, DType::F32, is_told.then_some(&input));
            let _ = (input * weight.reshape([2, 3, 4])).sum().backward();
            assert!(shared.take().is_some());
            *noted.lock().unwrap()
        };
        assert_eq!([noted(true), noted(false)], [Some(true), Some(false)]);
    }
}
