//! Collectives over flat buffers: all that the trainer knows of other ranks.
//!
//! An engine is driven by one thread, in one order that is the same on all ranks
//! ([`Comm`](super::communicator::Comm)). Movement is bytes, whatever they mean; sums are f32 for gradients and
//! f64 for the few numbers of a step. Lengths are the caller's duty and equal on all ranks.
//!
//! Every operation works on host memory. Those that move weights and gradients exist for tensors as well
//! ([`Transfer`]): an engine that knows device memory runs them where the tensors lie, and any other by way of
//! the host.

#[cfg(feature = "cuda")]
mod cuda;
mod local;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "cuda")]
mod nccl;
mod rendezvous;
mod solo;
mod transfer;

pub use local::{Local, LocalGroup};
#[cfg(feature = "mpi")]
pub use mpi::{Mpi, library_version as mpi_version};
#[cfg(feature = "cuda")]
pub use nccl::{Nccl, library_version as nccl_version, new_id as new_nccl_id};
pub use rendezvous::{Comer, Rendezvous};
pub use solo::Solo;
pub use transfer::Transfer;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::error::EngineError;

/// How [`Engine::all_reduce`] joins elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// Their sum.
    Sum,
    /// The largest.
    Max,
}

/// A rank's view of the others. It lives and dies in one thread: MPI's handles may not leave theirs.
pub trait Engine {
    /// What moves the bytes, for people.
    fn name(&self) -> &'static str;

    /// This rank.
    fn rank(&self) -> usize;

    /// Number of ranks, W.
    fn world_size(&self) -> usize;

    /// Every rank's `mine` of `[n]`, one after another, into `all` of `[W·n]`.
    ///
    /// # Errors
    /// [`EngineError`], as of every operation.
    fn all_gather(&mut self, mine: &[u8], all: &mut [u8]) -> Result<(), EngineError>;

    /// Part `r` of `send` goes to rank `r`; part `r` of `receive` comes from rank `r`; `[W·n]` both.
    ///
    /// # Errors
    /// [`EngineError`].
    fn all_to_all(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), EngineError>;

    /// This rank's part `[n]` of the sum over ranks of `full` of `[W·n]`, in the order of the engine.
    /// For an order of ours see [`ordered`](super::ordered).
    ///
    /// # Errors
    /// [`EngineError`].
    fn reduce_scatter(&mut self, full: &[f32], mine: &mut [f32]) -> Result<(), EngineError>;

    /// Joins each element over ranks. All ranks get the same bits.
    ///
    /// # Errors
    /// [`EngineError`].
    fn all_reduce(&mut self, values: &mut [f64], reduction: Reduction) -> Result<(), EngineError>;

    /// The bytes of `root`, on all ranks.
    ///
    /// # Errors
    /// [`EngineError`].
    fn broadcast(&mut self, bytes: &mut [u8], root: usize) -> Result<(), EngineError>;

    /// An engine among the ranks that give the same `color`, in the order of `key`. All ranks call it.
    ///
    /// # Errors
    /// [`EngineError`].
    fn split(&mut self, color: usize, key: usize) -> Result<Box<dyn Engine>, EngineError>;

    /// Makes a collective that does not end return an error once `given_up` is set.
    fn watch(&mut self, _given_up: Arc<AtomicBool>) {}

    /// Waits until what has been asked of the device has run: before collectives on tensors, so that a rank's own
    /// work does not look like waiting for others.
    ///
    /// # Errors
    /// [`EngineError::Failed`].
    fn settle(&mut self) -> Result<(), EngineError> {
        Ok(())
    }

    /// Whether tensors are best given to it as they are, with transfers on device memory.
    fn takes_tensors(&self) -> bool {
        false
    }

    /// [`Engine::all_gather`] of tensors.
    ///
    /// # Errors
    /// [`EngineError`].
    fn all_gather_tensor(&mut self, transfer: &mut Transfer) -> Result<(), EngineError> {
        transfer.by_host(|mine, all| self.all_gather(mine, all))
    }

    /// [`Engine::all_to_all`] of tensors.
    ///
    /// # Errors
    /// [`EngineError`].
    fn all_to_all_tensor(&mut self, transfer: &mut Transfer) -> Result<(), EngineError> {
        transfer.by_host(|send, receive| self.all_to_all(send, receive))
    }

    /// [`Engine::reduce_scatter`] of f32 tensors.
    ///
    /// # Errors
    /// [`EngineError`].
    fn reduce_scatter_tensor(&mut self, transfer: &mut Transfer) -> Result<(), EngineError> {
        transfer.by_host(|full, mine| {
            self.reduce_scatter(bytemuck::cast_slice(full), bytemuck::cast_slice_mut(mine))
        })
    }
}

/// The ranks that have given `color`, in the order of their keys; `said` is every rank's color and key.
pub fn members_of(said: &[[u64; 2]], color: u64) -> Vec<usize> {
    let of_color = said.iter().enumerate().filter(|(_, [theirs, _])| *theirs == color);
    let mut members: Vec<(u64, usize)> = of_color.map(|(rank, [_, key])| (*key, rank)).collect();
    members.sort_unstable();
    members.into_iter().map(|(_, rank)| rank).collect()
}

/// Checks that `whole` is `world_size` parts of `part` elements.
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
