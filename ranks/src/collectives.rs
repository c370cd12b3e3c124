//! Collectives on weights and gradients, through host memory or in place.

use std::sync::Arc;

use burn_tensor::{DType, Tensor};
use kernels::ops::cast;

use crate::communicator::{Communicator, Pending};
use crate::engine::Transfer;
use crate::error::EngineError;
use crate::mesh::Mesh;
use crate::topology::Extent;
use crate::wire::Wire;

/// A gather to be queued.
pub struct GatherRequest<'a> {
    /// Name of the unit.
    pub unit: &'a str,
    /// Shard of the unit that this rank holds.
    pub shard: &'a Tensor<1>,
    /// Element type on the wire.
    pub wire: Wire,
    /// Element type of the gathered buffer: f32, or that on the wire.
    pub dtype: DType,
    /// True if the gathered buffer is kept for longer than its unit runs.
    pub is_kept: bool,
    /// Part of the unit that is gathered.
    pub extent: Extent,
}

/// Queues the gather of `request`. A result from an engine on device memory is of the type that was
/// sent. A result that is kept has memory of its own; others share a few buffers of the host, or
/// the device's pool.
///
/// # Errors
/// [`EngineError`].
pub fn gather(comm: &Communicator, request: &GatherRequest<'_>) -> Result<Pending<Tensor<1>>, EngineError> {
    let GatherRequest { unit, shard, wire, dtype, is_kept, extent } = *request;
    let n_shards = comm.topology().n_shards(extent);
    if n_shards == 1 && !is_self_test(comm) {
        return Ok(Pending::Ready(cast(cast(shard.clone(), wire.dtype()), dtype)));
    }
    let [n] = shard.dims();
    let mut shard = Transfer::new(shard.clone(), n * n_shards, wire, comm.supports_device_tensors)?;
    shard = shard.with_decoding(dtype == DType::F32);
    if !is_kept {
        shard = shard.with_pool(Arc::clone(&comm.buffers));
    }
    Ok(comm.submit("gather", unit, move |mesh| mesh.gather(shard, extent)))
}

/// Queues the sum over ranks of the gradient `full` of `extent` of the unit, in f32 or in the type
/// of `wire`; this rank gets its shard, in f32.
///
/// # Errors
/// [`EngineError`].
pub fn reduce(
    comm: &Communicator,
    unit: &str,
    full: Tensor<1>,
    wire: Wire,
    extent: Extent,
) -> Result<Pending<Tensor<1>>, EngineError> {
    let topology = comm.topology();
    let is_alone = topology.n_shards(extent) * topology.n_replicas() == 1;
    if is_alone && !is_self_test(comm) {
        return Ok(Pending::Ready(cast(cast(full, wire.dtype()), DType::F32)));
    }
    let [len] = full.dims();
    let first = Mesh::first_transfer(full, wire, topology, extent, comm.exact, comm.supports_device_tensors)?;
    Ok(comm.submit("reduce", unit, move |mesh| mesh.reduce(first, len, extent)))
}

/// Returns true if one rank communicates with itself, as a test of an engine on device memory.
fn is_self_test(comm: &Communicator) -> bool {
    comm.supports_device_tensors && comm.topology().world_size == 1
}
