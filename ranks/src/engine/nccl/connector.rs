//! Start of NCCL: rank 0 makes an id, which the others get over another engine or at an address.

use kernels::device::{DeviceKind, context};

use super::{ID_BYTES, Nccl, library_version, new_id};
use crate::engine::Engine;
use crate::engine::connector::{Connector, Site};
use crate::engine::rendezvous::{Participant, Rendezvous};
use crate::error::EngineError;

/// NCCL, before it is started.
pub(in crate::engine) struct NcclConnector;

impl Connector for NcclConnector {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn library(&self) -> Result<String, String> {
        library_version()
    }

    fn check(&self, site: &Site) -> Result<(), String> {
        let device = gpu(site)?;
        self.library()?;
        context::enter(device).map_err(|error| format!("cuda:{device} cannot be used: {error}"))
    }

    fn needs_own_device(&self) -> bool {
        true
    }

    fn start(&self, site: &Site, other: Option<&mut dyn Engine>) -> Result<Box<dyn Engine>, EngineError> {
        let device = gpu(site).map_err(unavailable)?;
        let id = match other {
            Some(other) => broadcast_id(site, other)?,
            None if site.world_size == 1 => new_id()?.to_vec(),
            None => meet(site)?,
        };
        let id: [u8; ID_BYTES] =
            id.try_into().map_err(|_| unavailable("rank 0 sent something other than an id".into()))?;
        Ok(Box::new(Nccl::start(id, site.rank, site.world_size, device)?))
    }
}

fn unavailable(reason: String) -> EngineError {
    EngineError::Unavailable { engine: "nccl", reason }
}

/// Returns the index of the rank's GPU.
fn gpu(site: &Site) -> Result<usize, String> {
    match site.device.kind {
        DeviceKind::Cuda(index) => Ok(index),
        DeviceKind::Cpu | DeviceKind::Wgpu => {
            Err(format!("it needs --device cuda, but rank {} computes on {}", site.rank, site.device.name))
        }
    }
}

/// Sends the id that rank 0 makes to all ranks, over `other`.
fn broadcast_id(site: &Site, other: &mut dyn Engine) -> Result<Vec<u8>, EngineError> {
    let id = if site.rank == 0 { new_id().map(Some) } else { Ok(None) };
    // A length of zero means that rank 0 has failed, so that no rank waits for its message.
    let mut len = [0u8; 8];
    if let Ok(Some(bytes)) = &id {
        len = (bytes.len() as u64).to_ne_bytes();
    }
    other.broadcast(&mut len, 0)?;
    let mut bytes = id?.map(Vec::from).unwrap_or_default();
    bytes.resize(u64::from_ne_bytes(len) as usize, 0);
    other.broadcast(&mut bytes, 0)?;
    Ok(bytes)
}

/// Gets the id that rank 0 makes at the launch's address.
fn meet(site: &Site) -> Result<Vec<u8>, EngineError> {
    let (host, port) =
        site.address.clone().map_err(|reason| EngineError::Unavailable { engine: "rendezvous", reason })?;
    let rendezvous = Rendezvous { host, port, deadline: site.deadline };
    let participant = Participant { rank: site.rank, world_size: site.world_size, device: site.device.id };
    rendezvous.share(participant, || new_id().map(Vec::from))
}
