//! Collectives over flat buffers: the only interface of the trainer to other ranks.
//!
//! An engine is called by one thread, in one order that is the same on all ranks
//! ([`Communicator`](super::communicator::Communicator)). Data moves as bytes of any type; sums are
//! f32 for gradients and f64 for the few numbers of a step. The caller keeps lengths equal on all
//! ranks.
//!
//! Every operation works on host memory. Those that move weights and gradients exist for tensors as
//! well ([`Transfer`]): an engine on device memory runs them in place, and any other engine through
//! host memory.

mod connector;
#[cfg(feature = "cuda")]
mod cuda;
mod local;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "cuda")]
mod nccl;
mod registry;
#[cfg(any(feature = "cuda", test))]
mod rendezvous;
mod solo;
mod transfer;

pub use connector::{Connector, Site};
pub use local::{Local, LocalGroup};
pub use registry::{EngineChoice, connectors, start};
pub use solo::Solo;
pub use transfer::Transfer;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::error::EngineError;

/// Operation by which [`Engine::all_reduce`] combines elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// Sum of the elements.
    Sum,
    /// Largest of the elements.
    Max,
}

/// Connection of a rank to the others. Made, used and dropped in one thread: MPI handles must not
/// change threads.
pub trait Engine {
    /// Returns the name of the engine, for messages.
    fn name(&self) -> &'static str;

    /// Returns the index of this rank.
    fn rank(&self) -> usize;

    /// Returns the number of ranks, W.
    fn world_size(&self) -> usize;

    /// Gathers every rank's `mine` of `[n]`, one after another, into `all` of `[W·n]`.
    ///
    /// # Errors
    /// [`EngineError`], as for every operation.
    fn all_gather(&mut self, mine: &[u8], all: &mut [u8]) -> Result<(), EngineError>;

    /// Sends part `r` of `send` to rank `r` and receives part `r` of `receive` from rank `r`; both
    /// are `[W·n]`.
    ///
    /// # Errors
    /// [`EngineError`].
    fn all_to_all(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), EngineError>;

    /// Writes this rank's part `[n]` of the sum over ranks of `full` of `[W·n]` to `mine`, in an
    /// order of the engine. For an order that does not depend on the engine see
    /// [`ordered`](super::ordered).
    ///
    /// # Errors
    /// [`EngineError`].
    fn reduce_scatter(&mut self, full: &[f32], mine: &mut [f32]) -> Result<(), EngineError>;

    /// Reduces each element over ranks. All ranks get the same bits.
    ///
    /// # Errors
    /// [`EngineError`].
    fn all_reduce(&mut self, values: &mut [f64], reduction: Reduction) -> Result<(), EngineError>;

    /// Broadcasts the bytes of `root` to all ranks.
    ///
    /// # Errors
    /// [`EngineError`].
    fn broadcast(&mut self, bytes: &mut [u8], root: usize) -> Result<(), EngineError>;

    /// Creates an engine for the ranks that pass the same `color`, in the order of `key`. All ranks
    /// call it.
    ///
    /// # Errors
    /// [`EngineError`].
    fn split(&mut self, color: usize, key: usize) -> Result<Box<dyn Engine>, EngineError>;

    /// Makes a collective that does not end return an error once `abort_flag` is set.
    fn watch(&mut self, _abort_flag: Arc<AtomicBool>) {}

    /// Waits until all work queued on the device has run. It is called before collectives on
    /// tensors, so that this rank's own work is not counted as waiting for others.
    ///
    /// # Errors
    /// [`EngineError::Failed`].
    fn wait_for_device(&mut self) -> Result<(), EngineError> {
        Ok(())
    }

    /// Returns true if the engine takes tensors in place, as transfers on device memory.
    fn supports_device_tensors(&self) -> bool {
        false
    }

    /// Runs [`Engine::all_gather`] on tensors.
    ///
    /// # Errors
    /// [`EngineError`].
    fn all_gather_tensor(&mut self, transfer: &mut Transfer) -> Result<(), EngineError> {
        transfer.through_host(|mine, all| self.all_gather(mine, all))
    }

    /// Runs [`Engine::all_to_all`] on tensors.
    ///
    /// # Errors
    /// [`EngineError`].
    fn all_to_all_tensor(&mut self, transfer: &mut Transfer) -> Result<(), EngineError> {
        transfer.through_host(|send, receive| self.all_to_all(send, receive))
    }

    /// Runs [`Engine::reduce_scatter`] on f32 tensors.
    ///
    /// # Errors
    /// [`EngineError`].
    fn reduce_scatter_tensor(&mut self, transfer: &mut Transfer) -> Result<(), EngineError> {
        transfer.through_host(|full, mine| {
            self.reduce_scatter(bytemuck::cast_slice(full), bytemuck::cast_slice_mut(mine))
        })
    }
}

/// Returns the ranks that passed `color`, in the order of their keys. `colors_and_keys` holds
/// `[color, key]` of every rank.
pub fn color_members(colors_and_keys: &[[u64; 2]], color: u64) -> Vec<usize> {
    let mut members: Vec<(u64, usize)> = Vec::new();
    for (rank, [rank_color, key]) in colors_and_keys.iter().enumerate() {
        if *rank_color == color {
            members.push((*key, rank));
        }
    }
    members.sort_unstable();
    members.into_iter().map(|(_, rank)| rank).collect()
}

/// Checks that a buffer of `whole` elements consists of `world_size` parts of `part` elements.
pub fn check_parts(
    operation: &'static str,
    part: usize,
    whole: usize,
    world_size: usize,
) -> Result<(), EngineError> {
    if part * world_size == whole {
        return Ok(());
    }
    Err(EngineError::Lengths { operation, left: part, right: whole, world_size })
}
