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
/// [`DeviceFailure`]: any failure on the device so far.
pub fn read_back(tensor: Tensor<1>) -> Result<Vec<f32>, DeviceFailure> {
    let data = tensor.try_into_data().map_err(|error| failure(&error))?;
    data.try_into_vec::<f32>().map_err(|error| failure(&error))
}

/// Returns the failure that `error` reports.
pub fn failure(error: &impl ToString) -> DeviceFailure {
    DeviceFailure { reason: error.to_string() }
}
