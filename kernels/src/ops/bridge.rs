//! Registration of custom kernels with Burn's autodiff, on any backend.

use std::fmt::Debug;

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;
use burn_dispatch::backends::Autodiff;
use burn_dispatch::backends::autodiff::checkpoint::base::Checkpointer;
use burn_dispatch::backends::autodiff::checkpoint::strategy::NoCheckpointing;
use burn_dispatch::backends::autodiff::grads::Gradients;
use burn_dispatch::backends::autodiff::ops::{Backward, Ops, OpsKind};
use burn_dispatch::{DispatchKindConversion, DispatchTensor};
use burn_tensor::Tensor;

#[cfg(feature = "cube")]
use super::places::GradientPlace;

/// A kernel on backend `B` with `N` tensor inputs and one output.
pub(super) trait Kernel<B: Backend, const N: usize>: Clone + Debug + Send + 'static {
    /// Values kept for the backward pass.
    type Saved: Clone + Debug + Send + 'static;

    /// Returns the output, and the values that the backward pass needs.
    fn forward(&self, inputs: [FloatTensor<B>; N]) -> (FloatTensor<B>, Self::Saved);

    /// Returns the gradients of the `wanted` inputs, given the gradient of the output.
    fn backward(
        &self,
        saved: Self::Saved,
        grad: FloatTensor<B>,
        wanted: [bool; N],
    ) -> [Option<FloatTensor<B>>; N];

    /// Computes [`Kernel::backward`]. Gradients of inputs that have a place may be added there
    /// instead of being returned.
    #[cfg(feature = "cube")]
    fn backward_to(
        &self,
        saved: Self::Saved,
        grad: FloatTensor<B>,
        wanted: [bool; N],
        _places: [Option<GradientPlace>; N],
    ) -> [Option<FloatTensor<B>>; N] {
        self.backward(saved, grad, wanted)
    }
}

/// A backend with conversions between tensors and its primitives, with and without autodiff.
pub(super) trait PrimitiveBackend: Backend {
    /// Returns the primitive of a tensor, tracked by autodiff or not; `None` if the tensor is on
    /// another backend.
    fn to_primitive<const D: usize>(tensor: Tensor<D>) -> Option<Input<Self>>;
    /// Returns a tensor without autodiff.
    fn from_primitive<const D: usize>(primitive: FloatTensor<Self>) -> Tensor<D>;
    /// Returns a tensor that autodiff tracks.
    fn from_tracked_primitive<const D: usize>(primitive: Tracked<Self>) -> Tensor<D>;
}

impl<B: Backend> PrimitiveBackend for B
where
    DispatchTensor: DispatchKindConversion<B> + DispatchKindConversion<Autodiff<B>>,
{
    fn to_primitive<const D: usize>(tensor: Tensor<D>) -> Option<Input<B>> {
        if tensor.is_autodiff() {
            tensor.try_into_primitive::<Autodiff<B>>().ok().map(Input::Tracked)
        } else {
            tensor.try_into_primitive::<B>().ok().map(Input::Plain)
        }
    }

    fn from_primitive<const D: usize>(primitive: FloatTensor<B>) -> Tensor<D> {
        Tensor::from_primitive::<B>(primitive)
    }

    fn from_tracked_primitive<const D: usize>(primitive: Tracked<B>) -> Tensor<D> {
        Tensor::from_primitive::<Autodiff<B>>(primitive)
    }
}

/// A tensor of backend `B` that autodiff tracks.
pub(super) type Tracked<B> = FloatTensor<Autodiff<B>>;

/// An input of a kernel.
pub(super) enum Input<B: Backend> {
    Plain(FloatTensor<B>),
    Tracked(Tracked<B>),
}

impl<B: PrimitiveBackend, const D: usize> From<Tensor<D>> for Input<B> {
    fn from(tensor: Tensor<D>) -> Self {
        B::to_primitive(tensor).expect("callers ask where a tensor lives before they build inputs")
    }
}

/// Runs `kernel`, as one autodiff step if any input is tracked.
pub(super) fn run<B: PrimitiveBackend, K: Kernel<B, N>, const N: usize, const D: usize>(
    kernel: K,
    inputs: [Input<B>; N],
) -> Tensor<D> {
    if inputs.iter().all(|input| matches!(input, Input::Plain(_))) {
        let inputs = inputs.map(|input| match input {
            Input::Plain(tensor) => tensor,
            Input::Tracked(tensor) => tensor.into_primitive(),
        });
        return B::from_primitive(kernel.forward(inputs).0);
    }
    let tracked = inputs.map(|input| match input {
        Input::Tracked(tensor) => tensor,
        Input::Plain(tensor) => Tracked::<B>::new(tensor),
    });
    let nodes = tracked.each_ref().map(|tensor| tensor.node());
    let primitives = tracked.map(|tensor| tensor.into_primitive());
    let (output, saved) = kernel.forward(primitives);
    let step = KernelStep(std::marker::PhantomData::<K>);
    let prepared = step.prepare::<NoCheckpointing>(nodes).compute_bound().stateful();
    B::from_tracked_primitive(match prepared {
        OpsKind::Tracked(prepared) => prepared.finish((kernel, saved), output),
        OpsKind::UnTracked(prepared) => prepared.finish(output),
    })
}

#[derive(Debug)]
struct KernelStep<K>(std::marker::PhantomData<K>);

impl<B: Backend, K: Kernel<B, N>, const N: usize> Backward<B, N> for KernelStep<K> {
    type State = (K, K::Saved);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let (kernel, saved) = ops.state;
        let wanted = ops.parents.each_ref().map(Option::is_some);
        #[cfg(feature = "cube")]
        let input_grads = {
            let places = ops.parents.each_ref().map(|parent| GradientPlace::find(&parent.as_ref()?.id));
            kernel.backward_to(saved, grad, wanted, places)
        };
        #[cfg(not(feature = "cube"))]
        let input_grads = kernel.backward(saved, grad, wanted);
        for (parent, grad) in ops.parents.iter().zip(input_grads) {
            if let (Some(parent), Some(grad)) = (parent, grad) {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}
