//! Tensors that are used several times.
//!
//! ```text
//! y_i = x          gx = Σ_i gy_i          summed in the order of the backward pass
//! ```
//!
//! Autodiff adds such gradients as well, with a loop of the backend's that is not fast.

use burn_flex::{Flex, FlexTensor};
use burn_tensor::Tensor;

use super::bridge::{Home, Kernel, run};
use super::cpu::{Link, add, contiguous, is_flex, like, slice};

/// The gradients that have come back to a tensor.
#[derive(Debug, Clone, Default)]
pub struct SharedGradient(Link);

impl SharedGradient {
    /// `x` for one more use. Where its gradient is added up here, [`SharedGradient::take`] has it after the backward
    /// pass; elsewhere the gradients of autodiff have it.
    pub fn of<const D: usize>(&self, x: &Tensor<D>) -> Tensor<D> {
        if is_flex(x) && x.is_autodiff() {
            return run(Use { sum: self.0.clone() }, [x.clone().into()]);
        }
        x.clone()
    }

    /// The sum, if any gradient came back to here.
    pub fn take<const D: usize>(&self) -> Option<Tensor<D>> {
        self.0.take().map(Flex::give)
    }
}

#[derive(Debug, Clone)]
struct Use {
    sum: Link,
}

impl Kernel<Flex, 1> for Use {
    type Saved = ();

    fn forward(&self, [x]: &[FlexTensor; 1]) -> (FlexTensor, ()) {
        (x.clone(), ())
    }

    fn backward(&self, (): (), grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let sum = match self.sum.take() {
            Some(so_far) => {
                let mut sum = slice(&so_far).to_vec();
                add(&mut sum, slice(&contiguous(&grad)));
                like(&so_far, sum)
            }
            None => contiguous(&grad),
        };
        self.sum.leave(sum);
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
            let x = leaves(&device, &[[3, 5]], 1).remove(0);
            let uses = |get: &dyn Fn() -> Tensor<2>| {
                (gelu(get().unsqueeze::<3>()).sum() + (get() * get()).sum()).backward()
            };
            let shared = SharedGradient::default();
            let grads = uses(&|| shared.of(&x));
            let sum = shared.take().or_else(|| x.grad(&grads)).unwrap();
            assert_close("x", sum, x.grad(&uses(&|| x.clone())).unwrap(), 1e-6);
        }
    }
}
