//! The bridge between kernels on slices and Burn's autodiff on the Flex backend.

use std::fmt::Debug;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::{Autodiff, Flex};
use burn::tensor::{DType, Tensor, TensorData};

/// A kernel with `N` tensor inputs and one output.
pub(super) trait Kernel<const N: usize>: Clone + Debug + Send + 'static {
    /// What the backward pass needs.
    type Saved: Clone + Debug + Send + 'static;

    /// The output, and what to keep.
    fn forward(&self, inputs: &[FlexTensor; N]) -> (FlexTensor, Self::Saved);

    /// Gradients of the inputs that are wanted, given that of the output.
    fn backward(&self, saved: Self::Saved, grad: FlexTensor, wanted: [bool; N]) -> [Option<FlexTensor>; N];
}

/// Whether `tensor` is f32 and lives on the Flex backend, with or without autodiff.
pub(super) fn is_flex<const D: usize>(tensor: &Tensor<D>) -> bool {
    if tensor.dtype() != DType::F32 {
        return false;
    }
    match tensor.is_autodiff() {
        true => tensor.clone().try_into_primitive::<Autodiff<Flex>>().is_ok(),
        false => tensor.clone().try_into_primitive::<Flex>().is_ok(),
    }
}

/// Runs `kernel`, as one autodiff step if any input is under autodiff.
///
/// # Panics
/// If an input is not on the Flex backend, which [`is_flex`] tells beforehand.
pub(super) fn run<K: Kernel<N>, const N: usize, const D: usize>(kernel: K, inputs: [Input; N]) -> Tensor<D> {
    if inputs.iter().all(|input| matches!(input, Input::Plain(_))) {
        let inputs = inputs.map(|input| match input {
            Input::Plain(tensor) => tensor,
            Input::Tracked(tensor) => tensor.into_primitive(),
        });
        return Tensor::from_primitive::<Flex>(kernel.forward(&inputs).0);
    }
    let tracked = inputs.map(|input| match input {
        Input::Tracked(tensor) => tensor,
        Input::Plain(tensor) => AutodiffFlex::new(tensor),
    });
    let nodes = tracked.each_ref().map(|tensor| tensor.node());
    let primitives = tracked.map(|tensor| tensor.into_primitive());
    let (output, saved) = kernel.forward(&primitives);
    let step = KernelStep(std::marker::PhantomData::<K>);
    let prepared = step.prepare::<NoCheckpointing>(nodes).compute_bound().stateful();
    let output = match prepared {
        OpsKind::Tracked(prepared) => prepared.finish((kernel, saved), output),
        OpsKind::UnTracked(prepared) => prepared.finish(output),
    };
    Tensor::from_primitive::<Autodiff<Flex>>(output)
}

type AutodiffFlex = <Autodiff<Flex> as burn::backend::BackendTypes>::FloatTensorPrimitive;

/// A tensor on its way into a kernel.
pub(super) enum Input {
    Plain(FlexTensor),
    Tracked(AutodiffFlex),
}

impl<const D: usize> From<Tensor<D>> for Input {
    fn from(tensor: Tensor<D>) -> Self {
        const ON_FLEX: &str = "callers ask is_flex before they build inputs";
        if tensor.is_autodiff() {
            Self::Tracked(tensor.try_into_primitive::<Autodiff<Flex>>().expect(ON_FLEX))
        } else {
            Self::Plain(tensor.try_into_primitive::<Flex>().expect(ON_FLEX))
        }
    }
}

#[derive(Debug)]
struct KernelStep<K>(std::marker::PhantomData<K>);

impl<K: Kernel<N>, const N: usize> Backward<Flex, N> for KernelStep<K> {
    type State = (K, K::Saved);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<Flex>(&ops.node);
        let (kernel, saved) = ops.state;
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let input_grads = kernel.backward(saved, grad, wanted);
        for (parent, grad) in ops.parents.iter().zip(input_grads) {
            if let (Some(parent), Some(grad)) = (parent, grad) {
                grads.register::<Flex>(parent.id, grad);
            }
        }
    }
}

/// The tensor with its elements in row-major order in one piece.
pub(super) fn contiguous(tensor: &FlexTensor) -> FlexTensor {
    match tensor.as_slice::<f32>() {
        Some(_) => tensor.clone(),
        None => tensor.to_contiguous(),
    }
}

/// The elements of a contiguous tensor.
///
/// # Panics
/// If it is not contiguous f32; kernels take their inputs through [`contiguous`].
pub(super) fn slice(tensor: &FlexTensor) -> &[f32] {
    tensor.as_slice::<f32>().expect("kernels see contiguous f32 tensors")
}

/// Dimensions of a tensor.
pub(super) fn dims<const D: usize>(tensor: &FlexTensor) -> [usize; D] {
    std::array::from_fn(|i| tensor.layout().shape()[i])
}

/// A tensor from its elements.
pub(super) fn tensor<const D: usize>(data: Vec<f32>, shape: [usize; D]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(data, shape))
}
