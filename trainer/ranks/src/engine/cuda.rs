//! Device memory of Burn's CUDA tensors, as NCCL wants it: addresses.
//!
//! Why nothing is read too early or written too late:
//!
//! ```text
//! pinning      asks the device's one queue for an address and waits for the answer: every launch that any
//!              thread has queued before is then in a CUDA stream, and the memory stays where it is while the
//!              pin lives
//! before NCCL  cuCtxSynchronize: everything in every stream of the context has run, also what still read
//!              memory that has been given out anew
//! after NCCL   the collective's own stream is waited for before anybody is told that it has ended
//! ```
//!
//! What is queued between the first and the last of these runs beside the collective. It cannot write to what is
//! sent, which the transfer holds as well, and a tensor that has two holders is never changed in place; and nobody
//! else knows what is received.

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

/// Where the two tensors of a transfer lie.
pub(crate) struct Memory {
    send: ManagedResource<Resource>,
    receive: ManagedResource<Resource>,
}

impl Memory {
    /// Pins two flat tensors.
    pub(super) fn of(send: &Tensor<1>, receive: &Tensor<1>) -> Result<Self, EngineError> {
        Ok(Self { send: pinned(send)?, receive: pinned(receive)? })
    }

    /// First byte of what is sent.
    pub(super) fn send(&self) -> u64 {
        self.send.resource().ptr
    }

    /// First byte of where it is received.
    pub(super) fn receive(&self) -> u64 {
        self.receive.resource().ptr
    }
}

/// Whether `tensor` lies on a CUDA device. All of CubeCL's devices have one type of tensor; the service behind it
/// tells them apart.
pub(super) fn is_cuda(tensor: &Tensor<1>) -> bool {
    let service = std::any::TypeId::of::<Server>();
    tensor.clone().try_into_primitive::<Cuda>().is_ok_and(|cube| cube.client.service_id().service == service)
}

fn pinned(tensor: &Tensor<1>) -> Result<ManagedResource<Resource>, EngineError> {
    let failed = |reason: String| EngineError::Failed { engine: "nccl", operation: "pinning memory", reason };
    let cube = tensor
        .clone()
        .try_into_primitive::<Cuda>()
        .map_err(|_| failed("the tensor does not lie on a CUDA device".into()))?;
    let n_bytes = (cube.meta.shape()[0] * cube.dtype.size()) as u64;
    if cube.meta.strides()[0] != 1 && cube.meta.shape()[0] > 1 {
        return Err(failed("its elements do not lie one after another; this is a bug in ocelli".into()));
    }
    // What an earlier launch has broken is said here.
    let resource = cube.client.get_resource::<Server>(cube.handle.clone());
    let resource = resource.map_err(|error| failed(format!("{error:?}")))?;
    if resource.resource().size < n_bytes {
        return Err(failed(format!(
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

/// An error of the driver in `operation`.
pub(super) fn driver_failed(operation: &'static str, error: result::DriverError) -> EngineError {
    EngineError::Failed { engine: "nccl", operation, reason: error.to_string() }
}

/// Memory for what comes from the host and goes back there, grown when needed.
#[derive(Default)]
pub(super) struct Scratch {
    address: sys::CUdeviceptr,
    n_bytes: usize,
}

impl Scratch {
    /// The address of at least `n_bytes`.
    pub(super) fn at_least(&mut self, n_bytes: usize) -> Result<sys::CUdeviceptr, EngineError> {
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
            // SAFETY: the address is one of ours, and no collective is under way: each waits for its own end.
            // What cannot be given back is lost with the context, which is then lost as well.
            let _ = unsafe { result::free_sync(self.address) };
            self.n_bytes = 0;
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.release();
    }
}
