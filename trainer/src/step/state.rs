//! State that changes during training, all of which a checkpoint holds.

use crate::method::Method;
use crate::optim::state::UnitShard;

/// State that changes during training.
pub struct TrainState {
    /// Steps taken; the number of the next one.
    pub step: u64,
    /// Global batches skipped after a rollback: the next batch is `step + skipped_batches`.
    pub skipped_batches: u64,
    /// Steps in a row whose loss or gradient was not finite.
    pub bad_steps: u32,
    /// All networks, in the order of the method's list.
    pub networks: Vec<NetworkState>,
    /// Method, which owns the state that changes besides weights.
    pub method: Box<dyn Method>,
}

/// Shards of a network on this rank.
#[derive(Debug, Clone)]
pub struct NetworkState {
    /// Name of the network.
    pub name: &'static str,
    /// Whether the weights come from a file and stay as they are; checkpoints leave such a network
    /// out.
    pub is_frozen: bool,
    /// Name of the network whose weights it copies from time to time, if it does.
    pub copies: Option<&'static str>,
    /// Number of units of the backbone.
    pub n_backbone: usize,
    /// Shards of the backbone's units, then of the heads' units.
    pub shards: Vec<UnitShard>,
}

impl TrainState {
    /// The network `name`.
    pub fn network(&self, name: &str) -> Option<&NetworkState> {
        self.networks.iter().find(|network| network.name == name)
    }
}

impl NetworkState {
    /// Takes the weights of the units of `original` that it has as well.
    pub fn copy_from(&mut self, original: &Self) {
        for shard in &mut self.shards {
            let found = original.shards.iter().find(|found| found.layout.name == shard.layout.name);
            found.into_iter().for_each(|found| shard.weights = found.weights.clone());
        }
    }

    /// Shards of the backbone.
    pub fn backbone(&self) -> &[UnitShard] {
        &self.shards[..self.n_backbone]
    }
}
