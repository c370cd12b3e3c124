//! What a collective on tensors sends and where it receives.
//!
//! A transfer is made by the thread that computed what it sends, behind everything that this thread has asked
//! of the device; the communication thread then runs it. That order is what an engine on device memory relies
//! on.

use std::sync::Arc;

use burn_tensor::{DType, Device, Tensor, TensorData};
use kernels::device::host::{is_host, with_slice};

use crate::buffer_pool::BufferPool;
use crate::error::EngineError;
use crate::wire::{self, Wire};

/// Two flat tensors of one collective.
pub struct Transfer {
    /// In f32; on a device whose addresses are known in the type that travels.
    send: Tensor<1>,
    wire: Wire,
    /// Absent while an engine without access to device memory has not filled it.
    receive: Option<Tensor<1>>,
    n_receive: usize,
    /// Where what comes by way of the host is received; absent for memory of its own.
    buffers: Option<Arc<BufferPool>>,
    #[cfg(feature = "cuda")]
    pub(super) memory: Option<super::cuda::Memory>,
}

impl Transfer {
    /// Sends `send`, in f32, as `wire` has it, and receives `n_receive` elements. For `device_memory` what lies on a
    /// CUDA device is pinned to its address.
    ///
    /// # Errors
    /// [`EngineError::Unavailable`] when the addresses cannot be had.
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
            let memory = Some(super::cuda::Memory::of(&send, &receive)?);
            return Ok(Self { send, wire, receive: Some(receive), n_receive, buffers: None, memory });
        }
        // No build without CUDA has an engine that reads device memory.
        let _ = device_memory;
        // The communication thread reads what lies on a device. CubeCL lets it wait for memory that was given out since
        // it last looked, not for what has been written in place: a copy is such memory.
        let send = if is_host(&send) { send } else { send.clone() * 1.0 };
        Ok(Self {
            send,
            wire,
            receive: None,
            n_receive,
            buffers: None,
            #[cfg(feature = "cuda")]
            memory: None,
        })
    }

    /// Receives in a buffer out of `pool` what comes by way of the host.
    pub fn into_pool(self, pool: Arc<BufferPool>) -> Self {
        Self { buffers: Some(pool), ..self }
    }

    /// Elements sent and received.
    pub fn lengths(&self) -> [usize; 2] {
        [self.send.dims()[0], self.n_receive]
    }

    /// What the elements are as they travel.
    pub fn wire(&self) -> Wire {
        self.wire
    }

    /// Runs `collective` on host buffers of what is sent and received.
    ///
    /// # Errors
    /// Errors of `collective`.
    pub(super) fn by_host(
        &mut self,
        collective: impl FnOnce(&[u8], &mut [u8]) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let wire = self.wire;
        let fill = |received: &mut [f32]| {
            with_slice(&self.send.clone().cast(DType::F32), |values| match wire {
                Wire::F32 => collective(bytemuck::cast_slice(values), bytemuck::cast_slice_mut(received)),
                Wire::Bf16 => {
                    let [mut sent, mut bytes] =
                        [values.len(), received.len()].map(|n| vec![0; n * wire.bytes()]);
                    wire::encode(values, wire, &mut sent);
                    collective(&sent, &mut bytes)?;
                    wire::decode(&bytes, wire, received);
                    Ok(())
                }
            })
        };
        self.receive = Some(filled(self.n_receive, self.buffers.as_ref(), fill)?);
        Ok(())
    }

    /// What has been received: by way of the host in f32 and on the host, else on the device in the type that travels.
    ///
    /// # Panics
    /// If no collective has run, where that can be told: a bug in the mesh.
    pub fn received(self) -> Tensor<1> {
        self.receive.expect("the collective has run")
    }
}

/// A tensor on the host of `n` elements that `fill` has filled, in a buffer out of a pool or in memory of its own.
fn filled(
    n: usize,
    buffers: Option<&Arc<BufferPool>>,
    fill: impl FnOnce(&mut [f32]) -> Result<(), EngineError>,
) -> Result<Tensor<1>, EngineError> {
    if let Some(pool) = buffers {
        let mut buffer = pool.take(n);
        fill(buffer.values())?;
        return Ok(buffer.into_tensor(&Device::flex()));
    }
    let mut values = vec![0.0; n];
    fill(&mut values)?;
    Ok(Tensor::from_data(TensorData::new(values, [n]), &Device::flex()))
}
