//! NCCL, through the `cudarc` crate: between GPUs, one process each.
//!
//! The library is loaded at run time. Tensors are moved in place ([`cuda`]); data on the host goes
//! through a staging buffer in device memory. While a collective runs, the communicator is polled
//! for errors, which it detects on a network. It does not detect the death of a rank on the same
//! machine: the waiting thread does, and sets a flag.

#![allow(unsafe_code)]

mod calls;
mod connector;

pub(super) use connector::NcclConnector;

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::{result as driver, sys as cuda_sys};
use cudarc::nccl::{result, sys};
use kernels::device::context;

use self::calls::{describe, exchange, failed, gather, sum_parts};
use super::cuda;
use super::cuda::{PinnedTensors, StagingBuffer, driver_failed};
use super::{Engine, Reduction, Transfer, check_parts, color_members};
use crate::error::EngineError;

/// Bytes of the id that ranks of one communicator share.
const ID_BYTES: usize = 128;

/// Time for which the end of a collective is polled without a pause: most end sooner.
const SPIN_TIME: Duration = Duration::from_micros(200);
/// Pause between two later polls.
const POLL_PAUSE: Duration = Duration::from_micros(50);

/// A rank of an NCCL communicator.
pub(super) struct Nccl {
    /// Null once it has been aborted.
    communicator: sys::ncclComm_t,
    stream: cuda_sys::CUstream,
    rank: usize,
    world_size: usize,
    device: usize,
    send: StagingBuffer,
    receive: StagingBuffer,
    /// Set once this rank no longer waits for collectives.
    abort_flag: Arc<AtomicBool>,
}

/// Returns the version of the library, such as 2.27.3.
///
/// # Errors
/// The reason why the library cannot be loaded, in words.
fn library_version() -> Result<String, String> {
    // SAFETY: looks for files only.
    if !unsafe { sys::is_culib_present() } {
        return Err(
            "libnccl.so cannot be loaded; if only libnccl.so.2 is installed, add a link named libnccl.so \
                    to it in a folder of LD_LIBRARY_PATH"
                .into(),
        );
    }
    let version = result::get_nccl_version().map_err(|error| describe(&error))?;
    // 2.9 and later: major · 10⁴ + minor · 10² + patch.
    Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}

/// Creates the error of a copy between host and device.
fn copy_failed(error: driver::DriverError) -> EngineError {
    driver_failed("copying to or from the device", error)
}

/// Creates the id that one rank makes and all ranks pass to [`Nccl::start`].
///
/// # Errors
/// [`EngineError::Unavailable`].
fn new_id() -> Result<[u8; ID_BYTES], EngineError> {
    library_version().map_err(|reason| EngineError::Unavailable { engine: "nccl", reason })?;
    let id = result::get_uniqueid().map_err(|error| failed("creating the id of the communicator", &error))?;
    // The C header says char, which is signed on some machines.
    Ok(id.internal.map(|byte| byte as u8))
}

impl Nccl {
    /// Joins the communicator of `id` on the GPU number `device`. All ranks call it, each on a GPU
    /// of its own.
    ///
    /// # Errors
    /// [`EngineError`].
    fn start(id: [u8; ID_BYTES], rank: usize, world_size: usize, device: usize) -> Result<Self, EngineError> {
        context::enter(device).map_err(|error| EngineError::Unavailable {
            engine: "nccl",
            reason: format!("cuda:{device} cannot be used: {error}"),
        })?;
        let stream = driver::stream::create(driver::stream::StreamKind::NonBlocking)
            .map_err(|error| driver_failed("creating a stream", error))?;
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as _) };
        let mut communicator = std::ptr::null_mut();
        // SAFETY: the pointer is to a local that outlives the call; a context is current.
        unsafe { result::comm_init_rank(&mut communicator, world_size as i32, id, rank as i32) }
            .map_err(|error| failed("joining the other ranks", &error))?;
        Ok(Self {
            communicator,
            stream,
            rank,
            world_size,
            device,
            send: StagingBuffer::default(),
            receive: StagingBuffer::default(),
            abort_flag: Arc::default(),
        })
    }

    /// Runs `launch` on the engine's stream, and waits for its end. After an error the communicator
    /// is aborted before any memory that it may still write to is freed.
    fn run(
        &mut self,
        operation: &'static str,
        launch: impl FnOnce(sys::ncclComm_t, sys::cudaStream_t) -> Result<(), result::NcclError>,
    ) -> Result<(), EngineError> {
        if self.communicator.is_null() {
            let reason = "the communicator was aborted after an earlier error".into();
            return Err(EngineError::Failed { engine: "nccl", operation, reason });
        }
        let result = launch(self.communicator, self.stream.cast())
            .map_err(|error| failed(operation, &error))
            .and_then(|()| self.wait(operation));
        if result.is_err() {
            self.abort();
        }
        result
    }

    /// Aborts the communicator, which takes its kernels off the device.
    fn abort(&mut self) {
        // SAFETY: the communicator is this engine's own, and is not used again.
        unsafe { sys::ncclCommAbort(self.communicator) };
        self.communicator = std::ptr::null_mut();
    }

    fn wait(&self, operation: &'static str) -> Result<(), EngineError> {
        let start = Instant::now();
        loop {
            // SAFETY: the stream is this engine's own.
            match unsafe { cuda_sys::cuStreamQuery(self.stream) } {
                cuda_sys::CUresult::CUDA_SUCCESS => return Ok(()),
                cuda_sys::CUresult::CUDA_ERROR_NOT_READY => {}
                error => return Err(driver_failed(operation, driver::DriverError(error))),
            }
            if start.elapsed() < SPIN_TIME {
                std::hint::spin_loop();
                continue;
            }
            if self.abort_flag.load(Ordering::Relaxed) {
                let reason = "other ranks are lost".into();
                return Err(EngineError::Failed { engine: "nccl", operation, reason });
            }
            let mut state = sys::ncclResult_t::ncclSuccess;
            // SAFETY: the communicator is alive, the pointer is to a local.
            let status = unsafe { sys::ncclCommGetAsyncError(self.communicator, &mut state) };
            for result in [status, state] {
                if result != sys::ncclResult_t::ncclSuccess && result != sys::ncclResult_t::ncclInProgress {
                    return Err(failed(operation, &result::NcclError(result)));
                }
            }
            std::thread::sleep(POLL_PAUSE);
        }
    }

    /// Copies `send` to the device, runs `launch` on the addresses, and copies the result to
    /// `receive`.
    fn run_staged<T: bytemuck::Pod>(
        &mut self,
        operation: &'static str,
        send: &[T],
        receive: &mut [T],
        launch: impl FnOnce(u64, u64, sys::ncclComm_t, sys::cudaStream_t) -> Result<(), result::NcclError>,
    ) -> Result<(), EngineError> {
        if receive.is_empty() {
            // All ranks have equal lengths, so that no rank has any data.
            return Ok(());
        }
        let from = self.send.ensure_capacity(size_of_val(send))?;
        let to = self.receive.ensure_capacity(size_of_val(receive))?;
        // SAFETY: both buffers are at least as long as the slices. The copy is queued on the
        // collective's stream before it; the slice is borrowed until that stream has been waited
        // for. The copy back ends before its call returns.
        unsafe { driver::memcpy_htod_async(from, send, self.stream) }.map_err(copy_failed)?;
        self.run(operation, |communicator, stream| launch(from, to, communicator, stream))?;
        unsafe { driver::memcpy_dtoh_sync(receive, to) }.map_err(copy_failed)
    }

    /// Runs `launch` on the addresses of `transfer`.
    fn run_on_tensors(
        &mut self,
        operation: &'static str,
        transfer: &Transfer,
        launch: impl FnOnce(u64, u64, sys::ncclComm_t, sys::cudaStream_t) -> Result<(), result::NcclError>,
    ) -> Result<(), EngineError> {
        let memory: &PinnedTensors = transfer.memory.as_ref().ok_or_else(|| EngineError::Failed {
            engine: "nccl",
            operation,
            reason: "the transfer is not on device memory; this is a bug in ocelli".into(),
        })?;
        if transfer.lengths().contains(&0) {
            return Ok(());
        }
        let from = memory.send();
        let to = memory.receive();
        self.wait_for_device()?;
        self.run(operation, |communicator, stream| launch(from, to, communicator, stream))
    }
}

impl Engine for Nccl {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_gather(&mut self, mine: &[u8], all: &mut [u8]) -> Result<(), EngineError> {
        check_parts("all_gather", mine.len(), all.len(), self.world_size)?;
        self.run_staged("all_gather", mine, all, |from, to, communicator, stream| {
            gather(from, to, mine.len(), communicator, stream)
        })
    }

    fn all_to_all(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), EngineError> {
        let world_size = self.world_size;
        let n = send.len() / self.world_size;
        check_parts("all_to_all", n, receive.len(), world_size)?;
        self.run_staged("all_to_all", send, receive, |from, to, communicator, stream| {
            exchange(from, to, n, world_size, communicator, stream)
        })
    }

    fn reduce_scatter(&mut self, full: &[f32], mine: &mut [f32]) -> Result<(), EngineError> {
        check_parts("reduce_scatter", mine.len(), full.len(), self.world_size)?;
        let n = mine.len();
        self.run_staged("reduce_scatter", full, mine, |from, to, communicator, stream| {
            sum_parts(from, to, n, communicator, stream)
        })
    }

    fn all_reduce(&mut self, values: &mut [f64], reduction: Reduction) -> Result<(), EngineError> {
        let operation = match reduction {
            Reduction::Sum => sys::ncclRedOp_t::ncclSum,
            Reduction::Max => sys::ncclRedOp_t::ncclMax,
        };
        let mine = values.to_vec();
        let n = values.len();
        let double = sys::ncclDataType_t::ncclFloat64;
        self.run_staged("all_reduce", &mine, values, |from, to, communicator, stream| {
            let from = from as *const c_void;
            let to = to as *mut c_void;
            // SAFETY: both have `n` doubles and live until the stream has been waited for.
            unsafe { result::all_reduce(from, to, n, double, operation, communicator, stream) }.map(drop)
        })
    }

    fn broadcast(&mut self, bytes: &mut [u8], root: usize) -> Result<(), EngineError> {
        let mine = bytes.to_vec();
        let n = bytes.len();
        let byte = sys::ncclDataType_t::ncclUint8;
        self.run_staged("broadcast", &mine, bytes, |from, to, communicator, stream| {
            let from = from as *const c_void;
            let to = to as *mut c_void;
            // SAFETY: both have `n` bytes and live until the stream has been waited for.
            unsafe { result::broadcast(from, to, n, byte, root as i32, communicator, stream) }.map(drop)
        })
    }

    /// Splits by a new id from the first rank of each color: older libraries have no split.
    fn split(&mut self, color: usize, key: usize) -> Result<Box<dyn Engine>, EngineError> {
        let mut colors_and_keys = vec![[0u64; 2]; self.world_size];
        let mine = [color as u64, key as u64];
        self.all_gather(bytemuck::cast_slice(&mine), bytemuck::cast_slice_mut(&mut colors_and_keys))?;
        let members = color_members(&colors_and_keys, color as u64);
        // This rank is among those of its own color.
        let rank = members.iter().position(|member| *member == self.rank).unwrap_or_default();
        // A leader without an id sends zeros, so that the others do not wait for a message that
        // never comes.
        let local_id = if rank == 0 { new_id() } else { Ok([0; ID_BYTES]) };
        let mut ids = vec![0; ID_BYTES * self.world_size];
        self.all_gather(local_id.as_ref().unwrap_or(&[0; ID_BYTES]), &mut ids)?;
        local_id?;
        let mut id = [0; ID_BYTES];
        id.copy_from_slice(&ids[members[0] * ID_BYTES..][..ID_BYTES]);
        if id == [0; ID_BYTES] {
            let reason = format!("rank {} could not create an id for its group", members[0]);
            return Err(EngineError::Failed { engine: "nccl", operation: "split", reason });
        }
        let mut engine = Self::start(id, rank, members.len(), self.device)?;
        engine.abort_flag = Arc::clone(&self.abort_flag);
        Ok(Box::new(engine))
    }

    fn watch(&mut self, abort_flag: Arc<AtomicBool>) {
        self.abort_flag = abort_flag;
    }

    fn wait_for_device(&mut self) -> Result<(), EngineError> {
        cuda::wait_for_context()
    }

    fn supports_device_tensors(&self) -> bool {
        true
    }

    fn all_gather_tensor(&mut self, transfer: &mut Transfer) -> Result<(), EngineError> {
        let [mine, all] = transfer.lengths();
        let size = transfer.wire().bytes();
        check_parts("all_gather", mine, all, self.world_size)?;
        self.run_on_tensors("all_gather", transfer, |from, to, communicator, stream| {
            gather(from, to, mine * size, communicator, stream)
        })
    }

    fn all_to_all_tensor(&mut self, transfer: &mut Transfer) -> Result<(), EngineError> {
        let [send, receive] = transfer.lengths();
        let size = transfer.wire().bytes();
        let world_size = self.world_size;
        let n = send / self.world_size;
        check_parts("all_to_all", n, receive, world_size)?;
        self.run_on_tensors("all_to_all", transfer, |from, to, communicator, stream| {
            exchange(from, to, n * size, world_size, communicator, stream)
        })
    }

    fn reduce_scatter_tensor(&mut self, transfer: &mut Transfer) -> Result<(), EngineError> {
        let [full, mine] = transfer.lengths();
        check_parts("reduce_scatter", mine, full, self.world_size)?;
        self.run_on_tensors("reduce_scatter", transfer, |from, to, communicator, stream| {
            sum_parts(from, to, mine, communicator, stream)
        })
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // SAFETY: communicator and stream are this engine's own and are not used again. Nothing can
        // be done about an error here.
        unsafe {
            if !self.communicator.is_null() {
                sys::ncclCommDestroy(self.communicator);
            }
            let _ = driver::stream::destroy(self.stream);
        }
    }
}
