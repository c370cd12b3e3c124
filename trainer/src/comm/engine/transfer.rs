//! What a collective on tensors sends and where it receives.
//!
//! A transfer is made by the thread that computed what it sends, behind everything that this thread has asked
//! of the device; the communication thread then runs it. That order is what an engine on device memory relies
//! on.

use burn_tensor::{Bytes, Tensor, TensorData};
use bytemuck::Pod;

use super::EngineError;

/// Two flat tensors of one collective.
pub struct Transfer {
    send: Tensor<1>,
    /// Absent while an engine without access to device memory has not filled it.
    receive: Option<Tensor<1>>,
    n_receive: usize,
    #[cfg(feature = "cuda")]
    pub(super) memory: Option<super::cuda::Memory>,
}

impl Transfer {
    /// Sends `send` and receives `n_receive` elements of its type. For `device_memory` what lies on a CUDA device
    /// is pinned to its address.
    ///
    /// # Errors
    /// [`EngineError::Unavailable`] when the addresses cannot be had.
    pub fn new(send: Tensor<1>, n_receive: usize, device_memory: bool) -> Result<Self, EngineError> {
        if !device_memory {
            return Ok(Self::over_host(send, n_receive));
        }
        Self::on_device(send, n_receive)
    }

    fn over_host(send: Tensor<1>, n_receive: usize) -> Self {
        Self {
            send,
            receive: None,
            n_receive,
            #[cfg(feature = "cuda")]
            memory: None,
        }
    }

    #[cfg(feature = "cuda")]
    fn on_device(send: Tensor<1>, n_receive: usize) -> Result<Self, EngineError> {
        if !super::cuda::is_cuda(&send) {
            return Ok(Self::over_host(send, n_receive));
        }
        let receive = Tensor::<1>::empty([n_receive], (&send.device(), send.dtype()));
        let memory = super::cuda::Memory::of(&send, &receive)?;
        Ok(Self { send, receive: Some(receive), n_receive, memory: Some(memory) })
    }

    /// No build without CUDA has an engine that asks for it.
    #[cfg(not(feature = "cuda"))]
    fn on_device(send: Tensor<1>, n_receive: usize) -> Result<Self, EngineError> {
        Ok(Self::over_host(send, n_receive))
    }

    /// Elements sent and received.
    pub fn lengths(&self) -> [usize; 2] {
        [self.send.dims()[0], self.n_receive]
    }

    /// Bytes of an element.
    pub fn element_bytes(&self) -> usize {
        self.send.dtype().size()
    }

    /// Runs `collective` on host buffers of what is sent and received.
    ///
    /// # Errors
    /// Those of `collective`.
    pub(super) fn by_host(
        &mut self,
        collective: impl FnOnce(&[u8], &mut [u8]) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let (device, dtype) = (self.send.device(), self.send.dtype());
        let sent = self.send.clone().into_data();
        let bytes = match self.element_bytes() {
            2 => received::<u16>(self.n_receive, |bytes| collective(sent.as_bytes(), bytes))?,
            _ => received::<u32>(self.n_receive, |bytes| collective(sent.as_bytes(), bytes))?,
        };
        let data = TensorData::from_bytes(bytes, [self.n_receive], dtype);
        self.receive = Some(Tensor::from_data(data, (&device, dtype)));
        Ok(())
    }

    /// What has been received.
    ///
    /// # Panics
    /// If no collective has run, where that can be told: a bug in the mesh.
    pub fn received(self) -> Tensor<1> {
        self.receive.expect("the collective has run")
    }
}

/// `n` elements of the size of `W`, and aligned as it is, that `fill` has filled.
fn received<W: Pod + Send + Sync>(
    n: usize,
    fill: impl FnOnce(&mut [u8]) -> Result<(), EngineError>,
) -> Result<Bytes, EngineError> {
    let mut words = vec![W::zeroed(); n];
    fill(bytemuck::cast_slice_mut(&mut words))?;
    Ok(Bytes::from_elems(words))
}
