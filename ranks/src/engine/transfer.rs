//! Tensors that a collective sends and receives.
//!
//! A transfer is made by the thread that computed the tensor that it sends, after all work that
//! this thread has queued on the device; the communication thread then runs it. An engine on device
//! memory relies on that order.

use std::sync::Arc;

use burn_tensor::{DType, Device, Tensor, TensorData};
use half::bf16;
use kernels::device::host::{is_host, with_bytes};
use kernels::ops::cast;

use crate::buffer_pool::BufferPool;
use crate::error::EngineError;
use crate::wire::{self, Wire};

/// Two flat tensors of one collective.
pub struct Transfer {
    /// Tensor that is sent, in f32 or in the type of the wire; in the latter where it is pinned.
    send: Tensor<1>,
    wire: Wire,
    /// Tensor that is received; `None` until an engine without access to device memory has received
    /// it.
    receive: Option<Tensor<1>>,
    n_receive: usize,
    /// Pool of buffers for receiving through host memory; without one, the tensor has memory of its
    /// own.
    buffers: Option<Arc<BufferPool>>,
    /// Whether data received through host memory is converted to f32 there.
    decodes: bool,
    #[cfg(feature = "cuda")]
    pub(super) memory: Option<super::cuda::PinnedTensors>,
}

impl Transfer {
    /// Creates a transfer that sends `send`, in f32 or in the type of `wire`, as elements of
    /// `wire`, and receives `n_receive` elements. With `device_memory`, tensors on a CUDA device
    /// are pinned to their addresses.
    ///
    /// # Errors
    /// [`EngineError::Failed`] when the tensors cannot be pinned.
    pub fn new(
        send: Tensor<1>,
        n_receive: usize,
        wire: Wire,
        device_memory: bool,
    ) -> Result<Self, EngineError> {
        #[cfg(feature = "cuda")]
        if device_memory && super::cuda::is_cuda(&send) {
            let send = send.cast(wire.dtype());
            let receive = Tensor::<1>::empty([n_receive], (&send.device(), send.dtype()));
            let memory = Some(super::cuda::PinnedTensors::new(&send, &receive)?);
            return Ok(Self {
                send,
                wire,
                receive: Some(receive),
                n_receive,
                buffers: None,
                decodes: false,
                memory,
            });
        }
        // Unused without CUDA: no such build has an engine that reads device memory.
        let _ = device_memory;
        // The communication thread reads tensors on a device. CubeCL makes it wait for memory that
        // was allocated since it last synchronized, not for writes in place: a copy is such memory.
        // With one reference alone, the product would be written in place.
        #[allow(clippy::redundant_clone)]
        let send = if is_host(&send) { send } else { send.clone() * 1.0 };
        Ok(Self {
            send,
            wire,
            receive: None,
            n_receive,
            buffers: None,
            decodes: false,
            #[cfg(feature = "cuda")]
            memory: None,
        })
    }

    /// Sets the pool of buffers for receiving through host memory.
    pub fn with_pool(self, pool: Arc<BufferPool>) -> Self {
        Self { buffers: Some(pool), ..self }
    }

    /// Sets whether the communication thread converts data received through host memory to f32.
    pub fn with_decoding(self, decodes: bool) -> Self {
        Self { decodes, ..self }
    }

    /// Returns the numbers of elements sent and received.
    pub fn lengths(&self) -> [usize; 2] {
        [self.send.dims()[0], self.n_receive]
    }

    /// Returns the type of the elements on the wire.
    pub fn wire(&self) -> Wire {
        self.wire
    }

    /// Runs `collective` on host buffers of the tensors that are sent and received.
    ///
    /// # Errors
    /// Errors of `collective`.
    pub(super) fn through_host(
        &mut self,
        collective: impl FnOnce(&[u8], &mut [u8]) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let wire = self.wire;
        let n = self.n_receive;
        let is_decoded = self.decodes && wire != Wire::F32;
        let dtype = if is_decoded { DType::F32 } else { wire.dtype() };
        self.receive = Some(fill_tensor(n, dtype, self.buffers.as_ref(), |received: &mut [u8]| {
            with_bytes(&cast(self.send.clone(), wire.dtype()), |sent| {
                if !is_decoded {
                    return collective(sent, received);
                }
                let mut encoded = vec![0; n * wire.bytes()];
                collective(sent, &mut encoded)?;
                wire::decode(&encoded, wire, bytemuck::cast_slice_mut(received));
                Ok(())
            })
        })?);
        Ok(())
    }

    /// Returns the tensor received, in the type of the wire unless it was decoded: on the host if
    /// it was received through host memory, else on the device.
    ///
    /// # Panics
    /// If no collective has run, where that can be detected: a bug in the mesh.
    pub fn received(self) -> Tensor<1> {
        self.receive.expect("the collective has run")
    }
}

/// Creates a host tensor of `n` elements of `dtype` whose bytes `fill` writes, in a buffer of a
/// pool or in memory of its own.
fn fill_tensor(
    n: usize,
    dtype: DType,
    buffers: Option<&Arc<BufferPool>>,
    fill: impl FnOnce(&mut [u8]) -> Result<(), EngineError>,
) -> Result<Tensor<1>, EngineError> {
    if let Some(pool) = buffers {
        let mut buffer = pool.take(n, dtype);
        fill(buffer.bytes())?;
        return Ok(buffer.into_tensor(&Device::flex()));
    }
    let data = match dtype {
        DType::BF16 => {
            let mut values = vec![bf16::ZERO; n];
            fill(bytemuck::cast_slice_mut(&mut values))?;
            TensorData::new(values, [n])
        }
        _ => {
            let mut values = vec![0.0f32; n];
            fill(bytemuck::cast_slice_mut(&mut values))?;
            TensorData::new(values, [n])
        }
    };
    Ok(Tensor::from_data(data, (&Device::flex(), dtype)))
}
