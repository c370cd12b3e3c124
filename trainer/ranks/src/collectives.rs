//! Collectives on weights and gradients, through host memory or in place.

use std::sync::Arc;

use burn_tensor::{DType, Tensor};
use kernels::ops::cast;

use crate::communicator::{Communicator, Pending};
use crate::engine::Transfer;
use crate::error::EngineError;
use crate::mesh::Mesh;
use crate::wire::Wire;

/// Queues a gather of the unit of which `shard` is this rank's part, sent in the type of `wire`. The result is of `dtype`, f32 or
/// that type; what an engine has sent from a device's memory is as it was sent. A result that `is_kept` has memory of
/// its own; others share a few buffers of the host, or the device's pool.
///
/// # Errors
/// [`EngineError`].
pub fn gather(
    comm: &Communicator,
    unit: &str,
    shard: &Tensor<1>,
    wire: Wire,
    dtype: DType,
    is_kept: bool,
) -> Result<Pending<Tensor<1>>, EngineError> {
    let group_size = comm.topology().group_size;
    if group_size == 1 && !is_self_test(comm) {
        return Ok(Pending::Ready(cast(cast(shard.clone(), wire.dtype()), dtype)));
    }
    let [n] = shard.dims();
    let mut shard = Transfer::new(shard.clone(), n * group_size, wire, comm.supports_device_tensors)?;
    shard = shard.decoded(dtype == DType::F32);
    if !is_kept {
        shard = shard.with_pool(Arc::clone(&comm.buffers));
    }
    Ok(comm.submit("gather", unit, move |mesh| mesh.gather(shard)))
}

/// Queues the sum over ranks of the unit's gradient `full`, in f32 or in the type of `wire`; this rank gets its shard, in f32.
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
        return Ok(Pending::Ready(cast(cast(full, wire.dtype()), DType::F32)));
    }
    let [len] = full.dims();
    let first = Mesh::transfer_of(full, wire, comm.topology(), comm.exact, comm.supports_device_tensors)?;
    Ok(comm.submit("reduce", unit, move |mesh| mesh.reduce(first, len)))
}

/// Returns true if one rank communicates with itself, as a test of an engine on device memory.
fn is_self_test(comm: &Communicator) -> bool {
    comm.supports_device_tensors && comm.topology().world_size == 1
}
