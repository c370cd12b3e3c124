//! What a run changes as it trains, all of which a checkpoint holds.

use crate::method::Method;
use crate::optim::state::UnitShard;

/// Everything that changes while a run trains.
pub struct TrainState {
    /// Steps taken; the number of the next one.
    pub step: u64,
    /// Global batches passed over after a rollback: the next batch is `step + skipped_batches`.
    pub skipped_batches: u64,
    /// Steps in a row whose loss or gradient was not finite.
    pub bad_steps: u32,
    /// Units of the backbone, then of the heads.
    pub shards: Vec<UnitShard>,
    /// The method, which owns what moves without gradients.
    pub method: Box<dyn Method>,
}
