//! How steps are taken.

use networks::patches::PixelInput;
use ranks::topology::{Sharding, Topology};

use super::batch::Share;
use super::precision::Precision;

/// How steps are taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepConfig {
    /// Seed of the run, for initial weights and drop-path.
    pub seed: u64,
    /// How pixels reach the first unit.
    pub input: PixelInput,
    /// Units of the backbone, from the last on, that keep their graph.
    pub n_kept_graphs: usize,
    /// Worker threads.
    pub n_workers: usize,
    /// Micro-batches of a global batch, N; a multiple of the number of ranks.
    pub n_micro_batches: usize,
    /// Groups of micro-batches that share statistics over the batch.
    pub n_stat_groups: usize,
    /// What is cut over ranks.
    pub sharding: Sharding,
    /// Whether the shards lie in the host's memory, whatever computes.
    pub offload: bool,
    /// How weights and gradients travel, and what is computed with them.
    pub precision: Precision,
}

impl StepConfig {
    /// The share of a batch of the rank at `topology`.
    pub(super) fn share(&self, topology: Topology) -> Share {
        let n_micro_batches = (self.n_micro_batches / topology.world_size).max(1);
        Share { n_micro_batches, topology }
    }
}
