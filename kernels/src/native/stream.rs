//! Work on CubeCL's stream: launches through the driver, or calls into one of NVIDIA's libraries,
//! in order with the CubeCL kernels that the calling thread launches.
//!
//! CubeCL runs each device on a thread of its own, which takes tasks from one queue. A task that is
//! submitted through [`DeviceHandle`] enters the same queue as launches, so that tasks and launches
//! of one thread remain in order. The task receives CubeCL's server, whose `write_streams` returns
//! a CUDA stream for each thread that launches.
//!
//! Invariants of the code below:
//!
//! - The resolved streams are held until the work is queued: they make the stream wait for other
//!   threads that wrote a buffer.
//! - Buffers that are written are declared, so that a failure taints them, and every read of them,
//!   at last that of the loss, fails with its cause. A task whose inputs are tainted is skipped.
//! - A task returns its error: CubeCL only logs a panic.
//! - [`queue`] neither allocates nor waits.
//!
//! The traits are public, but intended for authors of runtimes: CubeCL's version is pinned in the
//! workspace's manifest.

use cubecl::client::Client;
use cubecl::cuda::CudaRuntime;
use cubecl_common::device_handle::{CallResultExt, DeviceHandle};
use cubecl_environment::stream::StreamId;
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::{BufferBinding, Handle, ServerError};
use cubecl_server::command::DeviceStream;
use cubecl_server::id::KernelId;
use cubecl_server::stream::{ExecuteScope, WriteScoped};
use cudarc::driver::sys::CUstream;

type Server = <CudaRuntime as Runtime>::Server;

/// Stream to queue work on, and the addresses of the work's buffers.
pub(crate) struct Stream<'a> {
    /// CUDA stream of the thread that submitted the task.
    pub(crate) stream: CUstream,
    /// Addresses of the buffers that are read, then of those that are written.
    pub(crate) addresses: &'a [u64],
}

/// Identifies launches of this module in CubeCL's error reports.
struct NativeLaunch;

/// Returns whether `client` computes on an NVIDIA GPU through CUDA.
pub(crate) fn is_cuda(client: &Client) -> bool {
    client.service_id().service == std::any::TypeId::of::<Server>()
}

/// Queues `work` on the calling thread's stream, behind everything that the thread has launched
/// before.
///
/// `read` and `written` are buffers that the work reads and writes; one that it adds to is in both.
/// Nothing may refer to a written buffer and expect its old contents. An error of `work` is
/// reported when a written buffer, or a result computed from it, is read.
pub(crate) fn queue(
    client: &Client,
    operation: &'static str,
    read: Vec<Handle>,
    written: Vec<Handle>,
    work: impl FnOnce(Stream<'_>) -> Result<(), String> + Send + 'static,
) {
    let stream_id = StreamId::current();
    let read: Vec<BufferBinding> = read.into_iter().map(Handle::binding).collect();
    let written: Vec<BufferBinding> = written.into_iter().map(Handle::binding).collect();
    let kernel = KernelId::new::<NativeLaunch>().info(operation);
    DeviceHandle::<Server>::new(client.service_id().device).submit(move |server: &mut Server| {
        let scope = ExecuteScope::launching(server, kernel, stream_id, read.iter(), written.clone());
        // The scope taints the written buffers; the read of a result returns the error.
        let _ = scope.execute(|server| {
            with_addresses(server, stream_id, &read, &written, work)?
                .map_err(|reason| server_error(operation, &reason))
        });
    });
}

/// Runs `task` on the device's thread, whose context is set for calls into the driver, and waits
/// for its result.
///
/// # Errors
/// [`ServerError`] if the stream cannot be created or `buffers` have no memory.
pub(crate) fn wait_for<R: Send>(
    client: &Client,
    buffers: Vec<Handle>,
    task: impl FnOnce(Stream<'_>) -> R + Send,
) -> Result<R, ServerError> {
    let stream_id = StreamId::current();
    let buffers: Vec<BufferBinding> = buffers.into_iter().map(Handle::binding).collect();
    DeviceHandle::<Server>::new(client.service_id().device)
        .submit_blocking(move |server: &mut Server| with_addresses(server, stream_id, &buffers, &[], task))
        .unwrap_or_resume()
}

/// Runs `task` with the stream of `stream_id` and the addresses of the buffers.
fn with_addresses<R>(
    server: &mut Server,
    stream_id: StreamId,
    read: &[BufferBinding],
    written: &[BufferBinding],
    task: impl FnOnce(Stream<'_>) -> R,
) -> Result<R, ServerError> {
    let mut streams = server.write_streams().resolve(stream_id, read.iter().chain(written))?;
    let mut addresses = Vec::with_capacity(read.len() + written.len());
    for binding in read.iter().chain(written) {
        // A recorded graph replays these addresses, and has to keep their pages.
        streams.current().capturing().touch(binding.stream, binding.memory.descriptor().location());
        let memory = streams.get(&binding.stream).device_memory();
        let resource =
            memory.get_resource(binding.memory.clone(), binding.offset_start, binding.offset_end)?;
        addresses.push(resource.ptr);
    }
    let stream = streams.current().signal();
    Ok(task(Stream { stream, addresses: &addresses }))
}

fn server_error(operation: &str, reason: &str) -> ServerError {
    ServerError::Generic { reason: format!("{operation}: {reason}"), backtrace: Default::default() }
}
