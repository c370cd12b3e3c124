//! Numbers that come back from a device, which is waited for.

use burn_tensor::Tensor;

/// A device that has failed at what it was asked to compute.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("device: computing failed: {reason}")]
pub struct DeviceFailure {
    /// What it said.
    pub reason: String,
}

/// The elements of `tensor` on the host.
///
/// # Errors
/// [`DeviceFailure`]: whatever went wrong on the device up to now.
pub fn read_back(tensor: Tensor<1>) -> Result<Vec<f32>, DeviceFailure> {
    let data = tensor.try_into_data().map_err(|error| failure(&error))?;
    data.try_into_vec::<f32>().map_err(|error| failure(&error))
}

/// The failure that `error` reports.
pub fn failure(error: &impl ToString) -> DeviceFailure {
    DeviceFailure { reason: error.to_string() }
}
