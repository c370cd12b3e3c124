//! The interface of an engine before it is started: whether it can serve a launch, and how it
//! starts.

use std::time::Duration;

use kernels::device::Opened;

use super::Engine;
use crate::error::EngineError;

/// Launch and device of a rank: everything from which an engine tells whether it can serve the
/// rank.
#[derive(Debug, Clone)]
pub struct Site {
    /// Name of the launcher, for messages.
    pub launcher: &'static str,
    /// Index of the rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Whether MPI has started the ranks.
    pub is_started_by_mpi: bool,
    /// Host and port of rank 0 at which ranks meet that MPI has not started, or the reason why
    /// there are none.
    pub address: Result<(String, u16), String>,
    /// Device on which the rank computes.
    pub device: Opened,
    /// Time that ranks may take to meet.
    pub deadline: Duration,
    /// Largest number of elements that a call may move; `None` for the engine's own limit.
    pub max_count: Option<usize>,
}

/// An engine between processes, before it is started.
pub trait Connector: Sync {
    /// Returns the name of the engine, as users write it.
    fn name(&self) -> &'static str;

    /// Returns name and version of the engine's library.
    ///
    /// # Errors
    /// The reason why it cannot be used, and a remedy where there is one.
    fn library(&self) -> Result<String, String>;

    /// Checks that the engine can serve the rank at `site`, as far as the rank can tell without the
    /// others.
    ///
    /// # Errors
    /// The reason, and a remedy where there is one.
    fn check(&self, site: &Site) -> Result<(), String>;

    /// Returns whether the engine meets the other ranks by itself, so that all can agree on another
    /// one through it.
    fn meets_by_itself(&self) -> bool {
        false
    }

    /// Returns whether every rank must have a device of its own.
    fn needs_own_device(&self) -> bool {
        false
    }

    /// Starts the engine in this thread. All ranks call it. `other` is an engine through which
    /// ranks may exchange what they need to meet; it is not used afterwards.
    ///
    /// # Errors
    /// [`EngineError`].
    fn start(&self, site: &Site, other: Option<&mut dyn Engine>) -> Result<Box<dyn Engine>, EngineError>;
}
