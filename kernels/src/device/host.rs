//! Operations on flat tensors, in place if their elements are in host memory.

use burn_flex::Flex;
use burn_tensor::{DType, Tensor, TensorData};
use half::bf16;
use multiversion::multiversion;

/// Returns the elements of a tensor in host memory, without a copy if they are already there and
/// not shared.
pub fn to_host(tensor: Tensor<1>) -> Vec<f32> {
    // Shards are f32 by construction.
    tensor.into_data().try_into_vec::<f32>().expect("shards hold f32")
}

/// Returns whether `tensor` is in host memory.
pub fn is_host(tensor: &Tensor<1>) -> bool {
    tensor.clone().try_into_primitive::<Flex>().is_ok()
}

/// Runs `f` on the elements of `tensor`: on its own memory if it is on the host, else on a copy.
pub fn with_slice<R>(tensor: &Tensor<1>, f: impl FnOnce(&[f32]) -> R) -> R {
    if let Ok(flex) = tensor.clone().try_into_primitive::<Flex>()
        && let Some(values) = flex.as_slice::<f32>()
    {
        return f(values);
    }
    f(&to_host(tensor.clone()))
}

/// Runs `f` on the bytes of the elements of `tensor`, f32 or bf16: on its own memory if it is on
/// the host, else on a copy.
pub fn with_bytes<R>(tensor: &Tensor<1>, f: impl FnOnce(&[u8]) -> R) -> R {
    if let Ok(flex) = tensor.clone().try_into_primitive::<Flex>() {
        let bytes = match flex.dtype() {
            DType::BF16 => flex.as_slice::<bf16>().map(bytemuck::cast_slice),
            _ => flex.as_slice::<f32>().map(bytemuck::cast_slice),
        };
        if let Some(bytes) = bytes {
            return f(bytes);
        }
    }
    f(tensor.to_data().as_bytes())
}

/// Runs `f` on the elements of `tensor` and stores its changes: in place if the tensor is on the
/// host and not shared.
pub fn on_host<R>(tensor: &mut Tensor<1>, f: impl FnOnce(&mut [f32]) -> R) -> R {
    let device = tensor.device();
    let owned = std::mem::replace(tensor, Tensor::zeros([1], &device));
    let mut values = to_host(owned);
    let result = f(&mut values);
    let len = values.len();
    *tensor = Tensor::from_data(TensorData::new(values, [len]), &device);
    result
}

/// Adds two flat tensors of the same length: in place, reusing `a`'s memory, if both are on the
/// host and `a` is not shared.
pub fn add(mut a: Tensor<1>, b: Tensor<1>) -> Tensor<1> {
    if !(is_host(&a) && is_host(&b)) {
        return a + b;
    }
    with_slice(&b, |b| on_host(&mut a, |a| add_slices(a, b)));
    a
}

/// Writes `values` into a flat tensor from `start` on, on the tensor's device.
pub fn assign(tensor: &mut Tensor<1>, start: usize, values: &Tensor<1>) {
    let range = start..start + values.dims()[0];
    if !is_host(tensor) {
        // Moved out, because `slice_assign` copies a tensor that has a second reference.
        let owned = std::mem::replace(tensor, Tensor::zeros([1], &values.device()));
        *tensor = owned.slice_assign([range], values.clone());
        return;
    }
    with_slice(values, |values| on_host(tensor, |tensor| tensor[range].copy_from_slice(values)));
}

/// Multiplies a flat tensor by a number, in its own memory if it is on the host and not shared.
pub fn scale(mut a: Tensor<1>, factor: f32) -> Tensor<1> {
    if !is_host(&a) {
        return a * factor;
    }
    on_host(&mut a, |a| a.iter_mut().for_each(|value| *value *= factor));
    a
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_slices(a: &mut [f32], b: &[f32]) {
    for (a, b) in a.iter_mut().zip(b) {
        *a += b;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::devices;

    #[test]
    fn assign_keeps_the_device_of_the_tensor() {
        for device in devices() {
            let mut tensor = Tensor::<1>::from_floats([1.0, 2.0, 3.0, 4.0], &device);
            assign(&mut tensor, 1, &Tensor::from_floats([7.0, 8.0], &device));
            assert_eq!(tensor.device(), device);
            assert_eq!(to_host(tensor), [1.0, 7.0, 8.0, 4.0]);
        }
    }
}
