//! State that changes during training and that a checkpoint holds.

use crate::method::Method;
use crate::optim::state::UnitShard;

/// State that changes during training.
pub struct TrainState {
    /// Number of steps taken, which is the index of the next step.
    pub step: u64,
    /// Number of global batches skipped after a rollback: the next batch is `step +
    /// skipped_batches`.
    pub skipped_batches: u64,
    /// Number of consecutive steps whose loss or gradient was not finite.
    pub bad_steps: u32,
    /// All networks, in the order of the method's list.
    pub networks: Vec<NetworkState>,
    /// Method, which owns the state other than weights.
    pub method: Box<dyn Method>,
}

/// Shards of a network on this rank.
#[derive(Debug, Clone)]
pub struct NetworkState {
    /// Name of the network.
    pub name: &'static str,
    /// Whether the weights come from a file and never change; checkpoints do not contain such a
    /// network.
    pub is_frozen: bool,
    /// Name of the network whose weights it copies at intervals; `None` if it copies none.
    pub copies: Option<&'static str>,
    /// Number of units of the backbone.
    pub n_backbone: usize,
    /// Shards of the backbone's units, then of the heads' units.
    pub shards: Vec<UnitShard>,
}

impl TrainState {
    /// Returns the network `name`.
    pub fn network(&self, name: &str) -> Option<&NetworkState> {
        self.networks.iter().find(|network| network.name == name)
    }
}

impl NetworkState {
    /// Copies the weights of `original` to the units that both have.
    pub fn copy_from(&mut self, original: &Self) {
        for shard in &mut self.shards {
            let source = original.shards.iter().find(|source| source.layout.name == shard.layout.name);
            if let Some(source) = source {
                shard.weights = source.weights.clone();
            }
        }
    }

    /// Returns the shards of the backbone.
    pub fn backbone(&self) -> &[UnitShard] {
        &self.shards[..self.n_backbone]
    }
}
