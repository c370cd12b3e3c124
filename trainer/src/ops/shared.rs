//! Tensors that are used several times.
//!
//! ```text
//! y_i = x          gx = Σ_i gy_i          summed in the order of the backward pass
//! ```
//!
//! Autodiff adds such gradients as well, with a loop of the backend's that is not fast.

use std::sync::{Arc, Mutex, PoisonError};

use burn_flex::{Flex, FlexTensor};
use burn_tensor::Tensor;

use super::bridge::{Home, Kernel, run};
use super::cpu::{add, contiguous, is_flex, slice, tensor};

/// The gradients that have come back to a tensor.
#[derive(Debug, Clone, Default)]
pub struct SharedGradient(Sum);

/// In place, so that no more than the sum and its next term are there at once.
type Sum = Arc<Mutex<Option<Vec<f32>>>>;

impl SharedGradient {
    /// `x` for one more use. Where its gradient is added up here, [`SharedGradient::take`] has it after the backward
    /// pass; elsewhere the gradients of autodiff have it.
    pub fn of(&self, x: &Tensor<1>) -> Tensor<1> {
        if is_flex(x) && x.is_autodiff() {
            return run(Use { sum: Arc::clone(&self.0) }, [x.clone().into()]);
        }
        x.clone()
    }

    /// The sum, if any gradient came back to here.
    pub fn take(&self) -> Option<Tensor<1>> {
        let sum = self.0.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        let len = sum.len();
        Some(Flex::give(tensor(sum, [len])))
    }
}

#[derive(Debug, Clone)]
struct Use {
    sum: Sum,
}

impl Kernel<Flex, 1> for Use {
    type Saved = ();

    fn forward(&self, [x]: &[FlexTensor; 1]) -> (FlexTensor, ()) {
        (x.clone(), ())
    }

    fn backward(&self, (): (), grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let grad = contiguous(&grad);
        let mut sum = self.sum.lock().unwrap_or_else(PoisonError::into_inner);
        match sum.as_mut() {
            Some(sum) => add(sum, slice(&grad)),
            None => *sum = Some(slice(&grad).to_vec()),
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
                (gelu(get().unsqueeze::<3>()).sum() + (get() * get()).sum()).backward()
            };
            let shared = SharedGradient::default();
            let grads = uses(&|| shared.of(&x));
            let sum = shared.take().or_else(|| x.grad(&grads)).unwrap();
            assert_close("x", sum, x.grad(&uses(&|| x.clone())).unwrap(), 1e-6);
        }
    }
}
