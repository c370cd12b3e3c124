//! Two uses of one tensor, whose gradients are added in one pass.
//!
//! ```text
//! a = x   b = x      gx = ga + gb
//! ```
//!
//! On the CPU, autodiff would add them with an operation that is not optimized. Here the second use leaves its gradient
//! for the first one's backward pass, which runs later because its node is nearer to the start of the graph.

use burn_flex::{Flex, FlexTensor};
use burn_tensor::Tensor;

use super::bridge::{Kernel, run};
use super::cpu::{GradientSlot, add, contiguous, is_flex, owned, slice, slice_mut};

/// Returns `x` twice.
pub fn fork(x: Tensor<3>) -> [Tensor<3>; 2] {
    if !is_flex(&x) || !x.is_autodiff() {
        return [x.clone(), x];
    }
    let link = GradientSlot::default();
    let a: Tensor<3> = run(First { link: link.clone() }, [x.into()]);
    let b = run(Second { link }, [a.clone().into()]);
    [a, b]
}

#[derive(Debug, Clone)]
struct First {
    link: GradientSlot,
}

impl Kernel<Flex, 1> for First {
    type Saved = ();

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, ()) {
        (x, ())
    }

    fn backward(&self, (): (), grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let Some(of_second) = self.link.take() else { return [Some(grad)] };
        let mut sum = owned(grad);
        add(slice_mut(&mut sum), slice(&contiguous(&of_second)));
        [Some(sum)]
    }
}

/// The second use, which returns no gradient to autodiff, so that there is nothing to add.
#[derive(Debug, Clone)]
struct Second {
    link: GradientSlot,
}

impl Kernel<Flex, 1> for Second {
    type Saved = ();

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, ()) {
        (x, ())
    }

    fn backward(&self, (): (), grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        self.link.leave(grad);
        [None]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::gelu;
    use crate::ops::twin::{assert_close, devices, leaves};

    /// Uses of unequal depth, in both orders.
    #[test]
    fn gradients_of_both_uses_are_added() {
        for device in devices() {
            let x = leaves(&device, &[[3, 5, 37]], 1).remove(0);
            let gradient = |[a, b]: [Tensor<3>; 2]| {
                let y = gelu(gelu(a.clone())).mul_scalar(2.0) + b.clone() + gelu(b) * gelu(gelu(gelu(a)));
                x.grad(&y.sum().backward()).expect("leaf")
            };
            assert_close("sum", gradient(fork(x.clone())), gradient([x.clone(), x.clone()]), 1e-6);
        }
    }
}
