//! CUDA's context, which belongs to a thread.

use cudarc::driver::result;

/// Makes the context that Burn computes in the one of this thread.
///
/// # Errors
/// The driver's.
#[allow(unsafe_code)]
pub fn enter(device: usize) -> Result<(), result::DriverError> {
    result::init()?;
    let device = result::device::get(device as i32)?;
    // SAFETY: `device` is what the driver has just given. The context is never released: it lives as long as
    // the process, as Burn's own does.
    unsafe { result::ctx::set_current(result::primary_ctx::retain(device)?) }
}
