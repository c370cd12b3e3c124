//! The CUDA context, which is set per thread.

use cudarc::driver::result;

/// Makes the context that Burn computes in the current one of this thread.
///
/// # Errors
/// The driver's error.
#[allow(unsafe_code)]
pub fn enter(device: usize) -> Result<(), result::DriverError> {
    result::init()?;
    let device = result::device::get(device as i32)?;
    // SAFETY: `device` comes from the driver. The context is never released: it lives as long as
    // the process, as Burn's own does.
    unsafe { result::ctx::set_current(result::primary_ctx::retain(device)?) }
}
