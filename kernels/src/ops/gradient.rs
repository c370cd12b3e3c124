//! The gradient of a unit on a GPU, where operations add the gradients of its parameters: in the
//! buffer that is sent.
//!
//! ```text
//! flat[range] = Σ_uses g          f32, in the order of the backward pass
//! ```
//!
//! Each use of a parameter is a leaf of autodiff's graph, with a place in the buffer
//! (`GradientPlace`). The backward pass of an operation of ours looks up the places of its inputs
//! and adds their gradients there; of a matrix product it is the library that adds. Leaves that
//! Burn's operations use get a gradient from autodiff, which [`FlatGradient::finish`] adds.

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
    /// Adds the gradient of each leaf that autodiff has.
    #[allow(clippy::type_complexity)]
    leaves: Vec<Box<dyn FnOnce(&mut Gradients) + Send>>,
}

#[cfg(not(feature = "cube"))]
impl FlatGradient {
    /// Returns nothing: this build computes on a CPU, where gradients are added parameter by
    /// parameter.
    pub fn on_device_of(_: &Tensor<1>, _: bool) -> Option<Option<Self>> {
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
    /// Returns whether `flat`, the parameters of a unit, `[padded]`, is on a GPU, and if so the
    /// unit's gradient, with `tracks`; `None` on a CPU, where gradients are added parameter by
    /// parameter. It takes memory from the first gradient on.
    pub fn on_device_of(flat: &Tensor<1>, tracks: bool) -> Option<Option<Self>> {
        if !cube::is_cube(flat) {
            return None;
        }
        Some(tracks.then(|| Self { buffer: Buffer::like(flat), leaves: Vec::new() }))
    }

    /// Returns `value`, the elements `range` of the unit's parameters in any shape and type, as a
    /// leaf for one use.
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

    /// Returns the gradient after the backward pass: of the leaves that autodiff has a gradient of,
    /// it is added now.
    pub fn finish(self, grads: &mut Gradients) -> Tensor<1> {
        self.leaves.into_iter().for_each(|add| add(grads));
        self.buffer.take()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::ops::Range;

    use burn_tensor::DType;

    use super::*;
    use crate::ops::twin::{assert_close, devices, leaves};
    use crate::ops::{layer_norm, linear};

    /// The parameters of one use: a weight, its bias, and γ and β of a norm.
    struct Parameters {
        weight: Tensor<2>,
        vectors: [Tensor<1>; 3],
    }

    fn parameters(
        mut matrix: impl FnMut(Range<usize>) -> Tensor<2>,
        mut vector: impl FnMut(Range<usize>) -> Tensor<1>,
    ) -> Parameters {
        Parameters { weight: matrix(0..64), vectors: [64..72, 72..80, 80..88].map(&mut vector) }
    }

    /// Returns a number that depends on `x` of `[B, N, 8]` by norm(x · Wᵀ + b).
    fn loss(x: Tensor<3>, parameters: Parameters, power: i64) -> Tensor<1> {
        let [bias, gamma, beta] = parameters.vectors;
        let y = linear(x.autodiff(), parameters.weight, bias);
        layer_norm(y, gamma, beta, 1e-5).powi_scalar(power).sum()
    }

    /// Two uses of every parameter by operations of ours, and one by an operation of Burn's.
    #[test]
    fn gradients_of_all_uses_are_added_in_place() {
        for device in devices() {
            let flat = leaves(&device, &[[104]], 1).remove(0).inner();
            let Some(Some(gradient)) = FlatGradient::on_device_of(&flat, true) else { continue };
            let x = leaves(&device, &[[2, 5, 8]], 2).remove(0).inner();
            let twin = flat.clone().autodiff().require_grad();
            let of_twin = || {
                parameters(
                    |range| twin.clone().slice([range]).reshape([8, 8]),
                    |range| twin.clone().slice([range]),
                )
            };
            let total = loss(x.clone(), of_twin(), 3) + loss(x.clone() * 2.0, of_twin(), 2);
            let total = total + twin.clone().slice(64..72).powi_scalar(2).sum();
            let expected = twin.grad(&total.backward()).unwrap();

            let gradient = RefCell::new(gradient);
            let in_place = || {
                parameters(
                    |range| {
                        let value = flat.clone().slice([range.clone()]).reshape([8, 8]);
                        gradient.borrow_mut().leaf(value, range)
                    },
                    |range| gradient.borrow_mut().leaf(flat.clone().slice([range.clone()]), range),
                )
            };
            let total = loss(x.clone(), in_place(), 3) + loss(x.clone() * 2.0, in_place(), 2);
            let bias = gradient.borrow_mut().leaf(flat.clone().slice(64..72), 64..72);
            let mut grads = (total + bias.powi_scalar(2).sum()).backward();
            let found = gradient.into_inner().finish(&mut grads);
            assert_eq!(found.dtype(), DType::F32);
            assert_close("gradient", found.clone(), expected, 1e-5);
            let padding = found.slice(88..104).abs().sum().into_scalar::<f32>();
            assert_eq!(padding, 0.0);
        }
    }

    /// A unit without gradients has zeros.
    #[test]
    fn without_a_gradient_there_are_zeros() {
        for device in devices() {
            let flat = Tensor::<1>::ones([64], &device);
            let Some(Some(mut gradient)) = FlatGradient::on_device_of(&flat, true) else { continue };
            let leaf = gradient.leaf(flat.clone(), 0..64);
            let other = Tensor::<1>::ones([1], &device).autodiff().require_grad();
            let mut grads = (other.clone() * 2.0).backward();
            drop(leaf);
            let sum = gradient.finish(&mut grads).abs().sum().into_scalar::<f32>();
            assert_eq!(sum, 0.0);
        }
    }
}
