//! State that changes during training and that a checkpoint holds.

use std::collections::BTreeMap;

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
    /// Shards of the backbone's units, then of the heads' units. Those of a unit with adapters have
    /// the adapters.
    pub shards: Vec<UnitShard>,
    /// Shards of the weights to which adapters are added, by index of the unit; they never change.
    pub bases: BTreeMap<usize, UnitShard>,
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
        for shard in self.shards.iter_mut().chain(self.bases.values_mut()) {
            let source = original.buffers().find(|source| source.layout.name == shard.layout.name);
            if let Some(source) = source {
                shard.weights = source.weights.clone();
            }
        }
    }

    /// Returns the shards of all buffers, unit by unit.
    pub fn buffers(&self) -> impl Iterator<Item = &UnitShard> {
        let units = self.shards.iter().enumerate();
        units.flat_map(move |(unit, shard)| std::iter::once(shard).chain(self.bases.get(&unit)))
    }

    /// Returns the shards of all buffers of the backbone, unit by unit.
    pub fn backbone(&self) -> impl Iterator<Item = &UnitShard> {
        let units = self.shards[..self.n_backbone].iter().enumerate();
        units.flat_map(move |(unit, shard)| std::iter::once(shard).chain(self.bases.get(&unit)))
    }
}
