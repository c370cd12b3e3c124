//! Access to the elements of tensors on the Flex backend.

use burn_flex::Flex;
use burn_flex::FlexTensor;
use burn_tensor::{DType, Tensor, TensorData};
use half::bf16;
use multiversion::multiversion;

use super::bridge::PrimitiveBackend;
use super::number::Number;

/// Returns the element type of `tensor` if it is on the Flex backend, with or without autodiff.
pub(super) fn flex_dtype<const D: usize>(tensor: &Tensor<D>) -> Option<DType> {
    Flex::to_primitive(tensor.clone()).map(|_| tensor.dtype())
}

/// Returns whether `tensor` is an f32 tensor on the Flex backend, with or without autodiff.
pub(super) fn is_flex<const D: usize>(tensor: &Tensor<D>) -> bool {
    tensor.dtype() == DType::F32 && flex_dtype(tensor).is_some()
}

/// Returns the tensor with its elements contiguous in row-major order.
pub(super) fn contiguous(tensor: &FlexTensor) -> FlexTensor {
    match tensor.layout().contiguous_offsets() {
        Some(_) => tensor.clone(),
        None => tensor.to_contiguous(),
    }
}

/// Returns the elements of a contiguous f32 tensor.
///
/// # Panics
/// Under the conditions of [`elements`].
pub(super) fn slice(tensor: &FlexTensor) -> &[f32] {
    elements(tensor)
}

/// Returns the elements of a contiguous tensor.
///
/// # Panics
/// If it is not contiguous or has another element type. Kernels make their inputs [`contiguous`]
/// and know their element type.
pub(super) fn elements<T: Number>(tensor: &FlexTensor) -> &[T] {
    tensor.as_slice().expect("kernels see contiguous tensors of the numbers that they are made for")
}

/// Returns the tensor with contiguous elements that no other tensor shares.
pub(super) fn owned(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_unique() && tensor.layout().contiguous_offsets().is_some() {
        return tensor;
    }
    let source = contiguous(&tensor);
    match tensor.dtype() {
        DType::BF16 => like(&tensor, elements::<bf16>(&source).to_vec()),
        _ => like(&tensor, slice(&source).to_vec()),
    }
}

/// Returns the elements of an [`owned`] f32 tensor.
///
/// # Panics
/// Under the conditions of [`elements`].
pub(super) fn slice_mut(tensor: &mut FlexTensor) -> &mut [f32] {
    elements_mut(tensor)
}

/// Returns the elements of an [`owned`] tensor.
///
/// # Panics
/// Under the conditions of [`elements`].
pub(super) fn elements_mut<T: Number>(tensor: &mut FlexTensor) -> &mut [T] {
    let (start, end) = tensor.layout().contiguous_offsets().expect("kernels see contiguous tensors");
    &mut tensor.storage_mut()[start..end]
}

/// Returns the dimensions of a tensor.
pub(super) fn dims<const D: usize>(tensor: &FlexTensor) -> [usize; D] {
    std::array::from_fn(|i| tensor.layout().shape()[i])
}

/// Returns the number of rows of a tensor, which are its last dimension, and their length.
pub(super) fn rows_and_length(tensor: &FlexTensor) -> (usize, usize) {
    let shape = tensor.layout().shape();
    let length = shape[shape.num_dims() - 1];
    (shape.num_elements() / length.max(1), length)
}

/// Builds a tensor from its elements.
pub(super) fn tensor<T: Number, const D: usize>(data: Vec<T>, shape: [usize; D]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(data, shape))
}

/// Builds a tensor with the shape of `tensor` from its elements.
pub(super) fn like<T: Number>(tensor: &FlexTensor, data: Vec<T>) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(data, tensor.layout().shape().clone()))
}

/// Builds a tensor from its elements, with the shape of `tensor` but rows of `length` elements.
pub(super) fn like_with_length<T: Number>(tensor: &FlexTensor, data: Vec<T>, length: usize) -> FlexTensor {
    let mut shape = tensor.layout().shape().clone();
    let last = shape.num_dims() - 1;
    shape[last] = length;
    FlexTensor::from_data(TensorData::new(data, shape))
}

/// Computes `y += b`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub(super) fn add<T: Number>(y: &mut [f32], b: &[T]) {
    for (y, b) in y.iter_mut().zip(b) {
        *y += b.wide();
    }
}
