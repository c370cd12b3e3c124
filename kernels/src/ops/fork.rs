//! Two uses of one tensor, whose gradients are added in one pass.
//!
//! ```text
//! a = x   b = x      gx = ga + gb
//! ```
//!
//! On the CPU, autodiff would add them in a loop that is not optimized. Here the second use stores
//! its gradient for the backward pass of the first, which runs later because its node is nearer to
//! the start of the graph.

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, Tensor};
use half::bf16;
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cpu::{add, contiguous, elements, elements_mut, flex_dtype, owned, slice, slice_mut};
use super::link::Link;
use super::number::Number;

/// Returns `x` twice.
pub fn fork<const D: usize>(x: Tensor<D>) -> [Tensor<D>; 2] {
    if flex_dtype(&x).is_none_or(|dtype| dtype == DType::F64) || !x.is_autodiff() {
        return [x.clone(), x];
    }
    let link = Link::default();
    let a: Tensor<D> = run(First { link: link.clone() }, [x.into()]);
    let b = run(Second { link }, [a.clone().into()]);
    [a, b]
}

#[derive(Debug, Clone)]
struct First {
    link: Link<FlexTensor>,
}

impl Kernel<Flex, 1> for First {
    type Saved = ();

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, ()) {
        (x, ())
    }

    fn backward(&self, (): (), grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let Some(second) = self.link.take() else { return [Some(grad)] };
        let mut sum = owned(grad);
        let second = contiguous(&second);
        match sum.dtype() {
            DType::BF16 => add_bf16(elements_mut(&mut sum), elements(&second)),
            _ => add(slice_mut(&mut sum), slice(&second)),
        }
        [Some(sum)]
    }
}

/// Computes `a += b`, rounding each sum once.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_bf16(a: &mut [bf16], b: &[bf16]) {
    for (a, b) in a.iter_mut().zip(b) {
        *a = bf16::nearest(a.wide() + b.wide());
    }
}

/// The second use, which returns no gradient to autodiff, so that autodiff adds nothing.
#[derive(Debug, Clone)]
struct Second {
    link: Link<FlexTensor>,
}

impl Kernel<Flex, 1> for Second {
    type Saved = ();

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, ()) {
        (x, ())
    }

    fn backward(&self, (): (), grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        self.link.store(grad);
        [None]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_gradients_close, devices, leaves, types};
    use crate::ops::{cast, gelu};

    /// The uses have different depths in the graph, in both orders.
    #[test]
    fn gradients_of_both_uses_are_added() {
        for device in devices() {
            let x = leaves(&device, &[[3, 5, 37]], 1).remove(0);
            for (dtype, tolerance) in types(&device, 1e-6) {
                let forked = loss(fork(cast(x.clone(), dtype))).backward();
                let cloned = cast(x.clone(), dtype);
                let cloned = loss([cloned.clone(), cloned]).backward();
                assert_gradients_close("sum", &x, &forked, &cloned, tolerance);
            }
        }
    }

    fn loss([a, b]: [Tensor<3>; 2]) -> Tensor<1> {
        let y = gelu(gelu(a.clone())).mul_scalar(2.0) + b.clone() + gelu(b) * gelu(gelu(gelu(a)));
        y.sum()
    }
}
