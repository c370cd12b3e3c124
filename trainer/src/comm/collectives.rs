//! Weights and gradients on their way, over the host or where they lie.

use std::sync::Arc;

use burn_tensor::{DType, Tensor, TensorData};

use super::communicator::{Comm, Pending};
use super::engine::{EngineError, Transfer};
use super::mesh::Mesh;
use super::wire;
use super::wire::Wire;
use crate::device::host::with_slice;

/// Queues a gather of the unit of which `shard` is this rank's part. A result that is kept for long has
/// memory of its own; others share a few buffers of the host, or the device's pool.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn gather(
    comm: &Comm,
    unit: &str,
    shard: &Tensor<1>,
    wire: Wire,
    stays: bool,
) -> Result<Pending<Tensor<1>>, EngineError> {
    let group_size = comm.topology().group_size;
    if group_size == 1 && !is_trial(comm) {
        return Ok(Pending::Ready(rounded(shard.clone(), wire)));
    }
    if comm.takes_tensors {
        let [n] = shard.dims();
        let shard = Transfer::new(shard.clone().cast(wire.dtype()), n * group_size, true)?;
        return Ok(comm.submit("gather", unit, move |mesh| mesh.gather_tensor(shard)));
    }
    let buffers = if stays { Arc::default() } else { Arc::clone(&comm.buffers) };
    let shard = shard.clone();
    Ok(comm.submit("gather", unit, move |mesh| {
        let device = shard.device();
        with_slice(&shard, |mine| {
            let mut buffer = buffers.take(mine.len() * group_size);
            match wire {
                Wire::F32 => {
                    let all = bytemuck::cast_slice_mut(buffer.values());
                    mesh.gather(bytemuck::cast_slice(mine), all)?;
                }
                Wire::Bf16 => {
                    let n_bytes = mine.len() * wire.bytes();
                    let mut sent = buffers.take(n_bytes.div_ceil(4));
                    let mut all = buffers.take((n_bytes * group_size).div_ceil(4));
                    wire::encode(mine, wire, sent.bytes(n_bytes));
                    mesh.gather(sent.bytes(n_bytes), all.bytes(n_bytes * group_size))?;
                    wire::decode(all.bytes(n_bytes * group_size), wire, buffer.values());
                }
            }
            Ok(buffer.into_tensor(&device))
        })
    }))
}

/// Queues the sum over ranks of the unit's gradient `full`, of which this rank gets its shard.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn reduce(
    comm: &Comm,
    unit: &str,
    full: Tensor<1>,
    wire: Wire,
) -> Result<Pending<Tensor<1>>, EngineError> {
    if comm.topology().world_size == 1 && !is_trial(comm) {
        return Ok(Pending::Ready(rounded(full, wire)));
    }
    if comm.takes_tensors {
        let [len] = full.dims();
        let first = Mesh::transfer_of(full, wire, comm.topology(), comm.exact, true)?;
        return Ok(comm.submit("reduce", unit, move |mesh| mesh.reduce_tensor(first, len, wire)));
    }
    Ok(comm.submit("reduce", unit, move |mesh| {
        let device = full.device();
        let mine = with_slice(&full, |full| mesh.reduce(full, wire))?;
        let len = mine.len();
        Ok(Tensor::from_data(TensorData::new(mine, [len]), &device))
    }))
}

/// Whether one rank talks to itself, which shows that an engine on device memory moves what it should.
fn is_trial(comm: &Comm) -> bool {
    comm.takes_tensors && comm.topology().world_size == 1
}

/// What is left of `values` after a trip on `wire`.
fn rounded(values: Tensor<1>, wire: Wire) -> Tensor<1> {
    match wire {
        Wire::F32 => values,
        Wire::Bf16 => values.cast(wire.dtype()).cast(DType::F32),
    }
}
