//! Transfers from a device to the host, which wait for the device.

use burn_tensor::Tensor;

/// A failed computation on a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("device: computing failed: {reason}")]
pub struct DeviceFailure {
    /// Message of the device.
    pub reason: String,
}

/// Waits for the device and copies the elements of `tensor` to the host.
///
/// # Errors
/// [`DeviceFailure`] for any failure on the device so far.
pub fn read_back(tensor: Tensor<1>) -> Result<Vec<f32>, DeviceFailure> {
    let data = tensor.try_into_data().map_err(|error| failure(&error))?;
    data.try_into_vec::<f32>().map_err(|error| failure(&error))
}

/// Copies the elements of `tensors` to the host, and runs `meanwhile` before it waits for the
/// copies. Kernels that `meanwhile` launches are queued behind the copies, so that the device has
/// work while the host wakes up.
///
/// # Errors
/// [`DeviceFailure`] for any failure on the device up to the copies.
pub fn read_back_while<R>(
    tensors: &[Tensor<1>],
    meanwhile: impl FnOnce() -> R,
) -> (Result<Vec<Vec<f32>>, DeviceFailure>, R) {
    #[cfg(feature = "cube")]
    if let Some(tensors) = on_one_device(tensors) {
        let handles = tensors.iter().map(|tensor| tensor.handle.clone()).collect();
        // Queues the copies; the future waits for them.
        let copies = tensors[0].client.read_async(handles);
        let result = meanwhile();
        // CubeCL submits launches to the device in batches of 32: without a flush, the last ones
        // would wait for further launches. The read reports a failure.
        let _ = tensors[0].client.flush();
        let copied = match cubecl::future::block_on(copies) {
            Ok(copied) => copied,
            Err(error) => return (Err(failure(&error)), result),
        };
        let mut values = Vec::with_capacity(tensors.len());
        for (bytes, tensor) in copied.iter().zip(&tensors) {
            // The buffer may be longer than the tensor.
            let n = tensor.meta.shape().iter().product();
            values.push(bytes.chunks_exact(4).take(n).map(decode_f32).collect());
        }
        return (Ok(values), result);
    }
    let result = meanwhile();
    (tensors.iter().map(|tensor| read_back(tensor.clone())).collect(), result)
}

/// Returns contiguous CubeCL tensors, if all `tensors` are f32 and on the same CubeCL device.
#[cfg(feature = "cube")]
fn on_one_device(tensors: &[Tensor<1>]) -> Option<Vec<burn_cubecl::tensor::CubeTensor>> {
    use burn_cubecl::CubeBackend;
    use burn_cubecl::tensor::CubeTensor;

    let mut primitives: Vec<CubeTensor> = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let tensor: CubeTensor = tensor.clone().try_into_primitive::<CubeBackend>().ok()?;
        let is_same_device = primitives.first().is_none_or(|first| first.device == tensor.device);
        if tensor.dtype != burn_tensor::DType::F32 || !is_same_device {
            return None;
        }
        primitives.push(burn_cubecl::kernel::into_contiguous(tensor));
    }
    if primitives.is_empty() { None } else { Some(primitives) }
}

/// Decodes an f32 from its four bytes.
#[cfg(feature = "cube")]
fn decode_f32(bytes: &[u8]) -> f32 {
    f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Converts an error of a device into a [`DeviceFailure`].
pub fn failure(error: &impl ToString) -> DeviceFailure {
    DeviceFailure { reason: error.to_string() }
}
