//! The gradient of a unit on a GPU: operations add the gradients of its parameters to one buffer,
//! which is also the buffer that is sent to other ranks.
//!
//! ```text
//! flat[range] = Σ_uses g          f32, in the order of the backward pass
//! ```
//!
//! Each use of a parameter is a leaf of autodiff's graph, with a place in the buffer
//! (`GradientPlace`). The backward pass of an operation of this crate looks up the places of its
//! inputs and adds their gradients there; those of matrix products are added by the library that
//! computes the products. Leaves that are used by Burn's operations get a gradient from autodiff,
//! which [`FlatGradient::finish`] adds.

#[cfg(feature = "cube")]
use std::sync::Arc;

use burn_tensor::{Gradients, Tensor};

#[cfg(feature = "cube")]
use super::bridge::{Input, PrimitiveBackend};
#[cfg(feature = "cube")]
use super::cube;
#[cfg(feature = "cube")]
use super::places::{Buffer, GradientPlace};
#[cfg(feature = "cube")]
use burn_cubecl::CubeBackend;

/// The flat gradient of a unit, `[padded]` in f32.
pub struct FlatGradient {
    #[cfg(feature = "cube")]
    buffer: Arc<Buffer>,
    #[cfg(not(feature = "cube"))]
    buffer: Tensor<1>,
    /// One function for each leaf, which adds its gradient if autodiff has one.
    #[allow(clippy::type_complexity)]
    leaves: Vec<Box<dyn FnOnce(&mut Gradients) + Send>>,
}

#[cfg(not(feature = "cube"))]
impl FlatGradient {
    /// Returns `None`: this build computes on a CPU, where gradients are summed parameter by
    /// parameter.
    pub fn on_device_of(_: &Tensor<1>) -> Option<Self> {
        None
    }

    /// Returns `value` as a leaf.
    pub fn leaf<const D: usize>(&mut self, value: Tensor<D>, _: std::ops::Range<usize>) -> Tensor<D> {
        value.autodiff().require_grad()
    }

    /// Returns the gradient.
    pub fn finish(self, grads: &mut Gradients) -> Tensor<1> {
        self.leaves.into_iter().for_each(|add| add(grads));
        self.buffer
    }
}

#[cfg(feature = "cube")]
impl FlatGradient {
    /// Returns the gradient of the unit whose parameters are `flat`, `[padded]`; `None` on a CPU,
    /// where gradients are summed parameter by parameter. Memory is allocated with the first
    /// gradient.
    pub fn on_device_of(flat: &Tensor<1>) -> Option<Self> {
        cube::is_cube(flat).then(|| Self { buffer: Buffer::new(flat), leaves: Vec::new() })
    }

    /// Returns `value`, which are the elements `range` of the unit's parameters in any shape and
    /// type, as a leaf for one use.
    pub fn leaf<const D: usize>(&mut self, value: Tensor<D>, range: std::ops::Range<usize>) -> Tensor<D> {
        let leaf = value.autodiff().require_grad();
        let place = GradientPlace::new(&self.buffer, range);
        let entry = match CubeBackend::to_primitive(leaf.clone()) {
            Some(Input::Tracked(tracked)) => Some(place.attach(tracked.node().id())),
            _ => None,
        };
        let used = leaf.clone();
        self.leaves.push(Box::new(move |grads| {
            drop(entry);
            let grad = used.grad_remove(grads).and_then(CubeBackend::to_primitive);
            if let Some(Input::Plain(grad)) = grad {
                cube::add_to_place(&place, &grad);
            }
        }));
        leaf
    }

    /// Returns the gradient after the backward pass, once the gradients of those leaves that
    /// autodiff has a gradient of are added.
    pub fn finish(self, grads: &mut Gradients) -> Tensor<1> {
        self.leaves.into_iter().for_each(|add| add(grads));
        self.buffer.take()
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use burn_tensor::DType;

    use super::*;
    use crate::ops::testing::{assert_close, devices, leaves};
    use crate::ops::{layer_norm, linear};

    /// The parameters of one use: a weight, its bias, and γ and β of a norm.
    struct Parameters {
        weight: Tensor<2>,
        bias: Tensor<1>,
        gamma: Tensor<1>,
        beta: Tensor<1>,
    }

    const WEIGHT: Range<usize> = 0..64;
    const BIAS: Range<usize> = 64..72;
    const GAMMA: Range<usize> = 72..80;
    const BETA: Range<usize> = 80..88;

    /// Returns the parameters as slices of `flat`, which autodiff tracks.
    fn sliced(flat: &Tensor<1>) -> Parameters {
        Parameters {
            weight: flat.clone().slice([WEIGHT]).reshape([8, 8]),
            bias: flat.clone().slice([BIAS]),
            gamma: flat.clone().slice([GAMMA]),
            beta: flat.clone().slice([BETA]),
        }
    }

    /// Returns the parameters as leaves whose gradients are added to `gradient`.
    fn placed(flat: &Tensor<1>, gradient: &mut FlatGradient) -> Parameters {
        Parameters {
            weight: gradient.leaf(flat.clone().slice([WEIGHT]).reshape([8, 8]), WEIGHT),
            bias: gradient.leaf(flat.clone().slice([BIAS]), BIAS),
            gamma: gradient.leaf(flat.clone().slice([GAMMA]), GAMMA),
            beta: gradient.leaf(flat.clone().slice([BETA]), BETA),
        }
    }

    /// Returns a number that depends on `x` of `[B, N, 8]` by norm(x · Wᵀ + b).
    fn loss(x: Tensor<3>, parameters: Parameters, power: i64) -> Tensor<1> {
        let Parameters { weight, bias, gamma, beta } = parameters;
        let y = linear(x.autodiff(), weight, bias);
        layer_norm(y, gamma, beta, 1e-5).powi_scalar(power).sum()
    }

    /// Every parameter is used twice by operations of this crate, and the bias once more by an
    /// operation of Burn.
    #[test]
    fn gradients_of_all_uses_are_added_in_place() {
        for device in devices() {
            let flat = leaves(&device, &[[104]], 1).remove(0).inner();
            let Some(mut gradient) = FlatGradient::on_device_of(&flat) else { continue };
            let x = leaves(&device, &[[2, 5, 8]], 2).remove(0).inner();
            let tracked = flat.clone().autodiff().require_grad();
            let total = loss(x.clone(), sliced(&tracked), 3) + loss(x.clone() * 2.0, sliced(&tracked), 2);
            let total = total + tracked.clone().slice(64..72).powi_scalar(2).sum();
            let expected = tracked.grad(&total.backward()).unwrap();

            let first = loss(x.clone(), placed(&flat, &mut gradient), 3);
            let second = loss(x.clone() * 2.0, placed(&flat, &mut gradient), 2);
            let bias = gradient.leaf(flat.clone().slice(64..72), 64..72);
            let mut grads = (first + second + bias.powi_scalar(2).sum()).backward();
            let sum = gradient.finish(&mut grads);
            assert_eq!(sum.dtype(), DType::F32);
            assert_close("gradient", sum.clone(), expected, 1e-5);
            let padding = sum.slice(88..104).abs().sum().into_scalar::<f32>();
            assert_eq!(padding, 0.0);
        }
    }

    #[test]
    fn a_unit_without_gradients_has_zeros() {
        for device in devices() {
            let flat = Tensor::<1>::ones([64], &device);
            let Some(mut gradient) = FlatGradient::on_device_of(&flat) else { continue };
            let leaf = gradient.leaf(flat.clone(), 0..64);
            let other = Tensor::<1>::ones([1], &device).autodiff().require_grad();
            let mut grads = (other.clone() * 2.0).backward();
            drop(leaf);
            let sum = gradient.finish(&mut grads).abs().sum().into_scalar::<f32>();
            assert_eq!(sum, 0.0);
        }
    }
}
