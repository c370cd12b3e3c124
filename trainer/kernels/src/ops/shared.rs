//! Tensors that are used several times.
//!
//! ```text
//! y_i = x          gx = Σ_i gy_i          summed in the order of the backward pass
//! ```
//!
//! Autodiff adds such gradients too, but with a loop of the backend that is not optimized.

use std::sync::{Arc, Mutex, PoisonError};

use burn_flex::{Flex, FlexTensor};
use burn_tensor::Tensor;

use super::bridge::{Kernel, PrimitiveBackend, run};
use super::cpu::{add, contiguous, is_flex, owned, slice, slice_mut};

/// The sum of the gradients of all uses of a tensor.
#[derive(Debug, Clone, Default)]
pub struct SharedGradient(Sum);

/// First gradient, to which the others are added in place. Gradients live until the end of the backward pass: a
/// copy would add to the peak memory.
type Sum = Arc<Mutex<Option<FlexTensor>>>;

impl SharedGradient {
    /// Returns `x` for one more use. Under autodiff on the CPU, [`SharedGradient::take`] returns its gradient after the
    /// backward pass; elsewhere it is among autodiff's gradients.
    pub fn of(&self, x: &Tensor<1>) -> Tensor<1> {
        if is_flex(x) && x.is_autodiff() {
            return run(Use { sum: Arc::clone(&self.0) }, [x.clone().into()]);
        }
        x.clone()
    }

    /// Takes the sum; `None` if no gradient was added here.
    pub fn take(&self) -> Option<Tensor<1>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take().map(Flex::from_primitive)
    }
}

#[derive(Debug, Clone)]
struct Use {
    sum: Sum,
}

impl Kernel<Flex, 1> for Use {
    type Saved = ();

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, ()) {
        (x.clone(), ())
    }

    fn backward(&self, (): (), grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let mut sum = self.sum.lock().unwrap_or_else(PoisonError::into_inner);
        match sum.as_mut() {
            Some(sum) => add(slice_mut(sum), slice(&contiguous(&grad))),
            None => *sum = Some(owned(grad)),
        }
        [None]
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
            let grads = uses(&|| shared.of(&x));
            let sum = shared.take().or_else(|| x.grad(&grads)).unwrap();
            assert_close("x", sum, x.grad(&uses(&|| x.clone())).unwrap(), 1e-6);
        }
    }
}
