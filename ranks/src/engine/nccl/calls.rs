//! NCCL calls on device addresses.

use std::ffi::c_void;

use cudarc::nccl::{result, sys};

use crate::error::EngineError;

/// Exchanges `n` bytes between every two ranks.
pub(super) fn exchange(
    from: u64,
    to: u64,
    n: usize,
    world_size: usize,
    communicator: sys::ncclComm_t,
    stream: sys::cudaStream_t,
) -> Result<(), result::NcclError> {
    let byte = sys::ncclDataType_t::ncclUint8;
    result::group_start()?;
    let queued = (0..world_size).try_for_each(|peer| {
        let offset = (peer * n) as u64;
        let from = (from + offset) as *const c_void;
        let to = (to + offset) as *mut c_void;
        // SAFETY: both buffers hold `world_size` parts of `n` bytes, and live until the group has
        // run.
        unsafe {
            result::send(from, n, byte, peer as i32, communicator, stream)?;
            result::recv(to, n, byte, peer as i32, communicator, stream).map(drop)
        }
    });
    // A group that was started is ended, or all later calls of this thread would belong to it.
    let ended = result::group_end();
    queued.and(ended.map(drop))
}

/// Gathers `n` bytes of every rank on all ranks.
pub(super) fn gather(
    from: u64,
    to: u64,
    n: usize,
    communicator: sys::ncclComm_t,
    stream: sys::cudaStream_t,
) -> Result<(), result::NcclError> {
    let byte = sys::ncclDataType_t::ncclUint8;
    // SAFETY: `from` has `n` bytes and `to` as many of every rank; both live until the stream has
    // been waited for.
    unsafe { result::all_gather(from as *const c_void, to as *mut c_void, n, byte, communicator, stream) }
        .map(drop)
}

/// Sums over ranks; each rank receives `n` elements of the sum.
pub(super) fn sum_parts(
    from: u64,
    to: u64,
    n: usize,
    communicator: sys::ncclComm_t,
    stream: sys::cudaStream_t,
) -> Result<(), result::NcclError> {
    let float = sys::ncclDataType_t::ncclFloat32;
    let sum = sys::ncclRedOp_t::ncclSum;
    // SAFETY: `from` has `n` floats for every rank and `to` has `n`; both live until the stream has
    // been waited for.
    unsafe {
        result::reduce_scatter(from as *const c_void, to as *mut c_void, n, float, sum, communicator, stream)
    }
    .map(drop)
}

/// Creates the error of the library in `operation`.
pub(super) fn failed(operation: &'static str, error: &result::NcclError) -> EngineError {
    EngineError::Failed { engine: "nccl", operation, reason: describe(error) }
}

/// Formats an error with its code, which the crate's own text lacks.
pub(super) fn describe(error: &result::NcclError) -> String {
    format!("{:?}; set NCCL_DEBUG=WARN for details", error.0)
}
