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
    /// All networks, in the order of the method's list.
    pub networks: Vec<NetworkState>,
    /// The method, which owns what changes beside weights.
    pub method: Box<dyn Method>,
}

/// This rank's shards of a network.
#[derive(Debug, Clone)]
pub struct NetworkState {
    /// Name of the network.
    pub name: &'static str,
    /// Whether its weights come from a file and stay as they are: checkpoints leave it out.
    pub is_frozen: bool,
    /// Units of its backbone.
    pub n_backbone: usize,
    /// Units of the backbone, then of the heads.
    pub shards: Vec<UnitShard>,
}

impl TrainState {
    /// The network `name`.
    pub fn network(&self, name: &str) -> Option<&NetworkState> {
        self.networks.iter().find(|network| network.name == name)
    }
}

impl NetworkState {
    /// Shards of the backbone.
    pub fn backbone(&self) -> &[UnitShard] {
        &self.shards[..self.n_backbone]
    }
}
