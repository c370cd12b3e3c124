//! Devices that a rank computes on: the CPU's cores, or a GPU.

mod choice;
#[cfg(feature = "cuda")]
pub mod context;
pub mod host;
pub mod readback;
mod tuning;
pub mod workers;

pub use burn_tensor::Device;
pub use choice::{DeviceChoice, DeviceError, DeviceKind, Opened, cuda_devices};
pub use readback::DeviceFailure;
pub use tuning::set_tuning_cache;
