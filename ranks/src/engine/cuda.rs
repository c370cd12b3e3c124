//! Addresses of Burn's CUDA tensors in device memory, for NCCL.
//!
//! Steps that prevent reads that are too early and writes that are too late:
//!
//! ```text
//! pinning      requests an address from the device's one queue and waits for it: every launch that
//!              a thread has queued before is then in a CUDA stream, and the memory is not moved
//!              while it is pinned
//! before NCCL  cuCtxSynchronize: everything in every stream of the context has run, including reads
//!              of memory that has since been allocated again
//! after NCCL   the collective's own stream is waited for before its end is reported
//! ```
//!
//! Work queued between the first and the last of these steps runs during the collective. It cannot
//! write to the tensor that is sent, which the transfer holds as well: a tensor with two holders is
//! never changed in place. Nothing else refers to the tensor that is received.

#![allow(unsafe_code)]

use burn_dispatch::backends::Cube as Cuda;
use burn_tensor::Tensor;
use cubecl::cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::ServerStorage;
use cubecl_runtime::storage::{ComputeStorage, ManagedResource};
use cudarc::driver::{result, sys};

use crate::error::EngineError;

type Server = <CudaRuntime as Runtime>::Server;
type Resource = <<Server as ServerStorage>::Storage as ComputeStorage>::Resource;

/// Pinned memory of the two tensors of a transfer.
pub(crate) struct PinnedTensors {
    send: ManagedResource<Resource>,
    receive: ManagedResource<Resource>,
}

impl PinnedTensors {
    /// Pins two flat tensors.
    pub(super) fn new(send: &Tensor<1>, receive: &Tensor<1>) -> Result<Self, EngineError> {
        Ok(Self { send: pin(send)?, receive: pin(receive)? })
    }

    /// Returns the address of the tensor that is sent.
    pub(super) fn send(&self) -> u64 {
        self.send.resource().ptr
    }

    /// Returns the address of the tensor that is received.
    pub(super) fn receive(&self) -> u64 {
        self.receive.resource().ptr
    }
}

/// Returns true if `tensor` is on a CUDA device. All of CubeCL's devices share one type of tensor;
/// the service behind it tells them apart.
pub(super) fn is_cuda(tensor: &Tensor<1>) -> bool {
    let service = std::any::TypeId::of::<Server>();
    tensor.clone().try_into_primitive::<Cuda>().is_ok_and(|cube| cube.client.service_id().service == service)
}

fn pinning_failed(reason: String) -> EngineError {
    EngineError::Failed { engine: "nccl", operation: "pinning memory", reason }
}

fn pin(tensor: &Tensor<1>) -> Result<ManagedResource<Resource>, EngineError> {
    let cube = tensor
        .clone()
        .try_into_primitive::<Cuda>()
        .map_err(|_| pinning_failed("the tensor does not lie on a CUDA device".into()))?;
    let n_bytes = (cube.meta.shape()[0] * cube.dtype.size()) as u64;
    if cube.meta.strides()[0] != 1 && cube.meta.shape()[0] > 1 {
        return Err(pinning_failed(
            "its elements do not lie one after another; this is a bug in ocelli".into(),
        ));
    }
    // Errors of earlier launches are reported here.
    let resource = cube.client.get_resource::<Server>(cube.handle.clone());
    let resource = resource.map_err(|error| pinning_failed(format!("{error:?}")))?;
    if resource.resource().size < n_bytes {
        return Err(pinning_failed(format!(
            "{} bytes for {n_bytes}; this is a bug in ocelli",
            resource.resource().size
        )));
    }
    Ok(resource)
}

/// Waits until everything in the context of this thread has run.
pub(super) fn wait_for_context() -> Result<(), EngineError> {
    result::ctx::synchronize().map_err(|error| driver_failed("waiting for the device", error))
}

/// Creates the error of the driver in `operation`.
pub(super) fn driver_failed(operation: &'static str, error: result::DriverError) -> EngineError {
    EngineError::Failed { engine: "nccl", operation, reason: error.to_string() }
}

/// Staging buffer in device memory for data of the host, grown when needed.
#[derive(Default)]
pub(super) struct StagingBuffer {
    address: sys::CUdeviceptr,
    n_bytes: usize,
}

impl StagingBuffer {
    /// Returns the address of at least `n_bytes` bytes.
    pub(super) fn ensure_capacity(&mut self, n_bytes: usize) -> Result<sys::CUdeviceptr, EngineError> {
        if self.n_bytes < n_bytes {
            self.release();
            // SAFETY: a context is current in the thread that owns the engine.
            self.address = unsafe { result::malloc_sync(n_bytes) }
                .map_err(|error| driver_failed("allocating on the device", error))?;
            self.n_bytes = n_bytes;
        }
        Ok(self.address)
    }

    fn release(&mut self) {
        if self.n_bytes > 0 {
            // SAFETY: the address was allocated here, and no collective is running: each waits for
            // its own end. Memory that cannot be freed is lost with the context, which is then lost
            // as well.
            let _ = unsafe { result::free_sync(self.address) };
            self.n_bytes = 0;
        }
    }
}

impl Drop for StagingBuffer {
    fn drop(&mut self) {
        self.release();
    }
}
