//! What can go wrong between ranks.

use kernels::device::DeviceFailure;

/// What can go wrong between ranks.
#[derive(Debug, Clone, thiserror::Error)]
pub enum EngineError {
    /// A rank's process has ended, or its line is dead.
    #[error("rank {rank} is lost ({how}) while this rank waits in {collective} of {unit} (number {number})")]
    PeerLost {
        /// The rank.
        rank: usize,
        /// How that is known.
        how: String,
        /// The collective that this rank is in.
        collective: &'static str,
        /// The unit, or what it is about.
        unit: String,
        /// Number of the collective since the start.
        number: u64,
    },
    /// A rank has given up for a reason of its own, which starting again would not change.
    #[error("rank {rank} has given up: {reason}")]
    PeerFailed {
        /// The rank.
        rank: usize,
        /// What it said.
        reason: String,
    },
    /// A collective took longer than the deadline.
    #[error("{collective} of {unit} (number {number}) has not ended within {seconds} s: {suspects}")]
    Deadline {
        /// The collective.
        collective: &'static str,
        /// The unit, or what it is about.
        unit: String,
        /// Number of the collective since the start.
        number: u64,
        /// The deadline.
        seconds: u64,
        /// Which ranks are behind, and where.
        suspects: String,
    },
    /// The engine's library reports an error.
    #[error("{engine}: {operation} failed: {reason}")]
    Failed {
        /// Its name.
        engine: &'static str,
        /// What was asked of it.
        operation: &'static str,
        /// What it said.
        reason: String,
    },
    /// The engine cannot be had.
    #[error("{engine}: {reason}")]
    Unavailable {
        /// Its name.
        engine: &'static str,
        /// Why, and what to do.
        reason: String,
    },
    /// An operation was given buffers that do not fit one another: a bug in ocelli.
    #[error(
        "{operation}: buffers of {left} and {right} elements on {world_size} ranks; this is a bug in ocelli"
    )]
    Lengths {
        /// The operation.
        operation: &'static str,
        /// One length.
        left: usize,
        /// The other.
        right: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// This rank's device has failed.
    #[error(transparent)]
    Device(#[from] DeviceFailure),
    /// The communication thread is gone.
    #[error("the communication thread has ended")]
    Ended,
}
