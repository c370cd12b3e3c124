//! The CUDA context, which is set per thread.

use cudarc::driver::result;

/// Sets Burn's CUDA context as the current context of the calling thread.
///
/// # Errors
/// The driver's error.
#[allow(unsafe_code)]
pub fn enter(device: usize) -> Result<(), result::DriverError> {
    result::init()?;
    let device = result::device::get(device as i32)?;
    // SAFETY: `device` comes from the driver. The context is never released: it lives as long as
    // the process, like Burn's own reference to it.
    unsafe { result::ctx::set_current(result::primary_ctx::retain(device)?) }
}
