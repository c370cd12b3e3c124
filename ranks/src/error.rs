//! Errors of communication between ranks.

use kernels::device::DeviceFailure;

/// An error of communication between ranks.
#[derive(Debug, Clone, thiserror::Error)]
pub enum EngineError {
    /// The process or thread of a rank has ended.
    #[error("rank {rank} is lost ({how}) while this rank waits in {collective} of {unit} (number {number})")]
    PeerLost {
        /// The rank.
        rank: usize,
        /// Evidence that the rank is lost.
        how: String,
        /// The collective that this rank waits in.
        collective: &'static str,
        /// Name of the unit, or subject of a collective without a unit.
        unit: String,
        /// Number of the collective since the start.
        number: u64,
    },
    /// A rank has stopped for a reason of its own that a restart would not change.
    #[error("rank {rank} gave up: {reason}")]
    PeerFailed {
        /// The rank.
        rank: usize,
        /// Reason that the rank reported.
        reason: String,
    },
    /// A collective took longer than the deadline.
    #[error("{collective} of {unit} (number {number}) has not finished within {seconds} s: {suspects}")]
    Deadline {
        /// The collective.
        collective: &'static str,
        /// Name of the unit, or subject of a collective without a unit.
        unit: String,
        /// Number of the collective since the start.
        number: u64,
        /// Time that the rank has waited.
        seconds: u64,
        /// Description of the ranks that are behind.
        suspects: String,
    },
    /// The engine's library reports an error.
    #[error("{engine}: {operation} failed: {reason}")]
    Failed {
        /// Name of the engine.
        engine: &'static str,
        /// The operation that failed.
        operation: &'static str,
        /// Reason for the failure.
        reason: String,
    },
    /// The engine is not available.
    #[error("{engine}: {reason}")]
    Unavailable {
        /// Name of the engine.
        engine: &'static str,
        /// Reason, and a remedy where there is one.
        reason: String,
    },
    /// An operation was called with buffers whose lengths do not match: a bug in ocelli.
    #[error(
        "{operation}: buffers of {left} and {right} elements on {world_size} ranks; this is a bug in ocelli"
    )]
    Lengths {
        /// The operation.
        operation: &'static str,
        /// Elements of a part.
        left: usize,
        /// Elements of the whole buffer.
        right: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// The device of this rank has failed.
    #[error(transparent)]
    Device(#[from] DeviceFailure),
    /// The communication thread has ended.
    #[error("the communication thread has ended")]
    Ended,
}
