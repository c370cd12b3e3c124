//! Flex tensors as slices.

use std::sync::{Arc, Mutex, PoisonError};

use burn_flex::Flex;
use burn_flex::FlexTensor;
use burn_tensor::{DType, Tensor, TensorData};

use multiversion::multiversion;

use super::bridge::Home;

/// Whether `tensor` is f32 and lives on the Flex backend, with or without autodiff.
pub(super) fn is_flex<const D: usize>(tensor: &Tensor<D>) -> bool {
    tensor.dtype() == DType::F32 && Flex::take(tensor.clone()).is_some()
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

/// The tensor with its elements in one piece that nobody else holds.
pub(super) fn owned(tensor: FlexTensor) -> FlexTensor {
    match tensor.is_unique() && tensor.as_slice::<f32>().is_some() {
        true => tensor,
        false => like(&tensor, slice(&contiguous(&tensor)).to_vec()),
    }
}

/// The elements of an [`owned`] tensor.
pub(super) fn slice_mut(tensor: &mut FlexTensor) -> &mut [f32] {
    let (start, end) = tensor.layout().contiguous_offsets().expect("kernels see contiguous f32 tensors");
    &mut tensor.storage_mut()[start..end]
}

/// Dimensions of a tensor.
pub(super) fn dims<const D: usize>(tensor: &FlexTensor) -> [usize; D] {
    std::array::from_fn(|i| tensor.layout().shape()[i])
}

/// A tensor from its elements.
pub(super) fn tensor<const D: usize>(data: Vec<f32>, shape: [usize; D]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(data, shape))
}

/// A tensor of the shape of `tensor` from its elements.
pub(super) fn like(tensor: &FlexTensor, data: Vec<f32>) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(data, tensor.layout().shape().clone()))
}

/// A gradient on its way from the end of a branch to its norm.
#[derive(Debug, Clone, Default)]
pub(super) struct Link(Arc<Mutex<Option<FlexTensor>>>);

impl Link {
    /// Leaves a gradient for whoever takes it.
    pub(super) fn leave(&self, grad: FlexTensor) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(grad);
    }

    /// The gradient that was left, if any was.
    pub(super) fn take(&self) -> Option<FlexTensor> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// `y += b`.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
pub(super) fn add(y: &mut [f32], b: &[f32]) {
    for (y, b) in y.iter_mut().zip(b) {
        *y += b;
    }
}
