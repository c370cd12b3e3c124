//! Collectives on weights and gradients, through host memory or in place.

use std::sync::Arc;

use burn_tensor::{DType, Tensor};

use crate::communicator::{Communicator, Pending};
use crate::engine::Transfer;
use crate::error::EngineError;
use crate::mesh::Mesh;
use crate::wire::Wire;

/// Queues a gather of the unit of which `shard` is this rank's part. A result that `is_kept` has memory of
/// its own; others share a few buffers of the host, or the device's pool.
///
/// # Errors
/// [`EngineError`].
pub fn gather(
    comm: &Communicator,
    unit: &str,
    shard: &Tensor<1>,
    wire: Wire,
    is_kept: bool,
) -> Result<Pending<Tensor<1>>, EngineError> {
    let group_size = comm.topology().group_size;
    if group_size == 1 && !is_self_test(comm) {
        return Ok(Pending::Ready(rounded(shard.clone(), wire)));
    }
    let [n] = shard.dims();
    let mut shard = Transfer::new(shard.clone(), n * group_size, wire, comm.supports_device_tensors)?;
    if !is_kept {
        shard = shard.with_pool(Arc::clone(&comm.buffers));
    }
    Ok(comm.submit("gather", unit, move |mesh| mesh.gather(shard)))
}

/// Queues the sum over ranks of the unit's gradient `full`, of which this rank gets its shard.
///
/// # Errors
/// [`EngineError`].
pub fn reduce(
    comm: &Communicator,
    unit: &str,
    full: Tensor<1>,
    wire: Wire,
) -> Result<Pending<Tensor<1>>, EngineError> {
    if comm.topology().world_size == 1 && !is_self_test(comm) {
        return Ok(Pending::Ready(rounded(full, wire)));
    }
    let [len] = full.dims();
    let first = Mesh::transfer_of(full, wire, comm.topology(), comm.exact, comm.supports_device_tensors)?;
    Ok(comm.submit("reduce", unit, move |mesh| mesh.reduce(first, len)))
}

/// Returns true if one rank communicates with itself, as a test of an engine on device memory.
fn is_self_test(comm: &Communicator) -> bool {
    comm.supports_device_tensors && comm.topology().world_size == 1
}

/// Rounds `values` as a transfer on `wire` does.
fn rounded(values: Tensor<1>, wire: Wire) -> Tensor<1> {
    match wire {
        Wire::F32 => values,
        Wire::Bf16 => values.cast(wire.dtype()).cast(DType::F32),
    }
}
