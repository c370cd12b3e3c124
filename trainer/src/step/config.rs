//! Configuration of the training step.

use networks::adapter::Adapter;
use networks::patches::PixelInput;
use ranks::topology::{Sharding, Topology};

use super::batch::Share;
use super::precision::Precision;
use crate::optim::LayerRates;

/// Configuration of the training step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepConfig {
    /// Seed of the run, for initial weights and random draws.
    pub seed: u64,
    /// Conversion of pixels into the input of the first unit.
    pub input: PixelInput,
    /// Number of backbone units, counted from the last, that keep their graphs.
    pub n_kept_graphs: usize,
    /// Number of backbone units in a segment of those that keep no graph; the first unit of a
    /// segment keeps its input.
    pub segment_len: usize,
    /// Largest number of elements of a backbone unit's parameters that is not divided; `None` to
    /// divide no unit.
    pub max_unit_numel: Option<usize>,
    /// Number of worker threads.
    pub n_workers: usize,
    /// Number of micro-batches of a global batch, N; a multiple of the number of ranks.
    pub n_micro_batches: usize,
    /// Number of groups of micro-batches, each with its own batch statistics.
    pub n_stat_groups: usize,
    /// Data that is sharded over ranks.
    pub sharding: Sharding,
    /// Ratios of the learning rates of the trained backbone's units to the learning rate of the
    /// run, and the units that are trained.
    pub rates: LayerRates,
    /// Adapters that are trained in place of the backbone's weights, if it has any.
    pub adapter: Option<Adapter>,
    /// Whether the shards are in host memory whatever the device that computes.
    pub offload: bool,
    /// Data types of computation, and of the weights and gradients that are sent.
    pub precision: Precision,
}

impl StepConfig {
    /// Returns the share of a batch of the rank at `topology`.
    pub(super) fn share(&self, topology: Topology) -> Share {
        let n_micro_batches = (self.n_micro_batches / topology.world_size).max(1);
        Share { n_micro_batches, topology }
    }
}
