//! The gradient of a unit on a GPU, where operations add the gradients of its parameters: in the buffer that is sent.
//!
//! ```text
//! flat[range] = Σ_uses g          f32, in the order of the backward pass
//! ```
//!
//! Each use of a parameter is a leaf of autodiff's graph, with a place in the buffer ([`GradientPlace`]). The backward pass of an
//! operation of ours looks up the places of its inputs and adds their gradients there; of a matrix product it is the library
//! that adds. Leaves that Burn's operations use get a gradient from autodiff, which [`FlatGradient::finish`] adds.

use burn_tensor::{Gradients, Tensor};

#[cfg(feature = "cube")]
pub(crate) use on_cube::{Claimed, GradientPlace};

/// The flat gradient of a unit, `[padded]` in f32.
pub struct FlatGradient {
    #[cfg(feature = "cube")]
    buffer: std::sync::Arc<on_cube::Buffer>,
    #[cfg(not(feature = "cube"))]
    buffer: Tensor<1>,
    /// Adds the gradient of each leaf that autodiff has.
    #[allow(clippy::type_complexity)]
    leaves: Vec<Box<dyn FnOnce(&mut Gradients) + Send>>,
}

#[cfg(not(feature = "cube"))]
impl FlatGradient {
    /// Returns nothing: this build computes on a CPU, where gradients are added parameter by parameter.
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
    /// Returns whether `flat`, the parameters of a unit, `[padded]`, is on a GPU, and if so the unit's gradient, with `tracks`; `None` on
    /// a CPU, where gradients are added parameter by parameter. It takes memory from the first gradient on.
    pub fn on_device_of(flat: &Tensor<1>, tracks: bool) -> Option<Option<Self>> {
        if !super::cube::is_cube(flat) {
            return None;
        }
        Some(tracks.then(|| Self { buffer: on_cube::Buffer::like(flat), leaves: Vec::new() }))
    }

    /// Returns `value`, the elements `range` of the unit's parameters in any shape and type, as a leaf for one use.
    pub fn leaf<const D: usize>(&mut self, value: Tensor<D>, range: std::ops::Range<usize>) -> Tensor<D> {
        let leaf = value.autodiff().require_grad();
        let place = GradientPlace::new(&self.buffer, range);
        let entry = place.attach(&leaf);
        let used = leaf.clone();
        self.leaves.push(Box::new(move |grads| {
            drop(entry);
            if let Some(grad) = used.grad_remove(grads) {
                place.add(&grad);
            }
        }));
        leaf
    }

    /// Returns the gradient after the backward pass: of the leaves that autodiff has a gradient of, it is added now.
    pub fn finish(self, grads: &mut Gradients) -> Tensor<1> {
        self.leaves.into_iter().for_each(|add| add(grads));
        self.buffer.take()
    }
}

#[cfg(feature = "cube")]
mod on_cube {
    use std::collections::{HashMap, HashSet};
    use std::ops::Range;
    use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

    use burn_cubecl::CubeBackend;
    use burn_cubecl::tensor::CubeTensor;
    use burn_dispatch::backends::autodiff::NodeId;
    use burn_tensor::{DType, Device, Tensor};

    use crate::ops::bridge::{Input, PrimitiveBackend};
    use crate::ops::cube::add_into;

    /// The places of leaves, by their nodes in autodiff's graph, which has no room for them. A leaf's entry lives as long as its
    /// [`Entry`].
    static PLACES: LazyLock<Mutex<HashMap<NodeId, GradientPlace>>> = LazyLock::new(Mutex::default);

    fn places() -> MutexGuard<'static, HashMap<NodeId, GradientPlace>> {
        // Entries are inserted and removed whole, so that the map stays valid if a holder panics.
        PLACES.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The memory of a flat gradient.
    #[derive(Debug)]
    pub(crate) struct Buffer {
        device: Device,
        len: usize,
        contents: Mutex<Contents>,
    }

    #[derive(Debug, Default)]
    struct Contents {
        /// Zeros where nothing has been added; absent before the first gradient.
        values: Option<CubeTensor>,
        /// Starts of the ranges that hold a gradient.
        written: HashSet<usize>,
    }

    impl Buffer {
        /// Creates the memory for the gradient of `flat`.
        pub(super) fn like(flat: &Tensor<1>) -> Arc<Self> {
            Arc::new(Self { device: flat.device(), len: flat.dims()[0], contents: Mutex::default() })
        }

        /// Returns the values, and whether the range from `start` on holds a gradient, as it does from now on.
        fn claim(&self, start: usize) -> (CubeTensor, bool) {
            let mut contents = self.contents.lock().unwrap_or_else(PoisonError::into_inner);
            let holds_gradient = !contents.written.insert(start);
            let values = contents.values.get_or_insert_with(|| self.zeros()).clone();
            (values, holds_gradient)
        }

        fn zeros(&self) -> CubeTensor {
            let zeros = Tensor::<1>::zeros([self.len], (&self.device, DType::F32));
            // It was made on the device of a tensor that `is_cube`.
            zeros.try_into_primitive::<CubeBackend>().expect("a tensor on a GPU")
        }

        /// Takes the values.
        pub(super) fn take(&self) -> Tensor<1> {
            let mut contents = self.contents.lock().unwrap_or_else(PoisonError::into_inner);
            let values = contents.values.take().unwrap_or_else(|| self.zeros());
            Tensor::from_primitive::<CubeBackend>(values)
        }
    }

    /// The place of a parameter's gradient in the flat gradient of its unit.
    #[derive(Debug, Clone)]
    pub(crate) struct GradientPlace {
        buffer: Arc<Buffer>,
        range: Range<usize>,
    }

    /// A place that a gradient is about to be written to.
    pub(crate) struct Claimed {
        /// The flat gradient.
        pub(crate) buffer: CubeTensor,
        /// Elements of the parameter.
        pub(crate) range: Range<usize>,
        /// Whether there is a gradient to add to; else there are zeros.
        pub(crate) holds_gradient: bool,
    }

    /// The entry of a leaf.
    pub(crate) struct Entry(NodeId);

    impl Drop for Entry {
        fn drop(&mut self) {
            places().remove(&self.0);
        }
    }

    impl GradientPlace {
        pub(super) fn new(buffer: &Arc<Buffer>, range: Range<usize>) -> Self {
            Self { buffer: Arc::clone(buffer), range }
        }

        /// Makes this the place of the gradient of `leaf`.
        pub(super) fn attach<const D: usize>(&self, leaf: &Tensor<D>) -> Option<Entry> {
            let Some(Input::Tracked(tracked)) = CubeBackend::to_primitive(leaf.clone()) else { return None };
            let id = tracked.node().id();
            places().insert(id, self.clone());
            Some(Entry(id))
        }

        /// Returns the place of the gradient of a node, if it is a leaf with one.
        pub(crate) fn of(node: &NodeId) -> Option<Self> {
            places().get(node).cloned()
        }

        /// Returns the memory to write a gradient to.
        pub(crate) fn claim(&self) -> Claimed {
            let (buffer, holds_gradient) = self.buffer.claim(self.range.start);
            Claimed { buffer, range: self.range.clone(), holds_gradient }
        }

        /// Adds `grad`, of as many elements in any shape.
        pub(super) fn add<const D: usize>(&self, grad: &Tensor<D>) {
            let Some(Input::Plain(grad)) = CubeBackend::to_primitive(grad.clone()) else { return };
            self.add_primitive(&grad);
        }

        /// Adds `grad`, of as many elements in any shape.
        pub(crate) fn add_primitive(&self, grad: &CubeTensor) {
            let Claimed { buffer, range, .. } = self.claim();
            add_into(&buffer, range, grad);
        }
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
            let total = total + twin.clone().slice([64..72]).powi_scalar(2).sum();
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
            let bias = gradient.borrow_mut().leaf(flat.clone().slice([64..72]), 64..72);
            let mut grads = (total + bias.powi_scalar(2).sum()).backward();
            let found = gradient.into_inner().finish(&mut grads);
            assert_eq!(found.dtype(), DType::F32);
            assert_close("gradient", found.clone(), expected, 1e-5);
            let padding = found.slice([88..104]).abs().sum().into_scalar::<f32>();
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
