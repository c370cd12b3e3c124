//! Bytes that a step moves between ranks, added up over its events.

use ranks::wire::Wire;

use super::Placement;
use super::placed::PlacedModel;
use crate::cost::{ModelCost, NetworkCost};
use crate::method::Collective;
use crate::step::schedule::{Event, StepNetwork};

/// Bytes that a rank receives in a step, and the number of collectives.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traffic {
    /// Bytes of gathered weights.
    pub gather_bytes: f64,
    /// Bytes of inputs and gradients of units whose columns are divided, within column groups.
    pub column_bytes: f64,
    /// Number of gathers.
    pub n_gathers: usize,
    /// Bytes of gradients within shard groups.
    pub reduce_bytes: f64,
    /// Number of reductions.
    pub n_reduces: usize,
    /// Bytes of gradients between replicas.
    pub replica_bytes: f64,
    /// Bytes of the method's collectives.
    pub other_bytes: f64,
    /// Number of sums of statistics over the batch.
    pub n_statistics: usize,
    /// Number of collectives besides gathers of weights, sums of gradients and exchanges within
    /// column groups: of the method, of statistics over the batch, and the agreement on norms and
    /// votes.
    pub n_other: usize,
}

impl Traffic {
    /// Returns the bytes of all collectives but statistics over the batch, the agreement on norms
    /// and votes, and numbers of rows within column groups.
    pub fn bytes(&self) -> f64 {
        self.gather_bytes + self.column_bytes + self.reduce_bytes + self.replica_bytes + self.other_bytes
    }
}

/// Bytes of a number that ranks reduce.
const NUMBER_BYTES: f64 = 8.0;

/// Estimates the traffic of a step.
pub fn traffic(model: &ModelCost, placement: &Placement) -> Traffic {
    let placed = PlacedModel { model, placement };
    let Placement { world_size, group_size, precision, .. } = *placement;
    let n_replicas = (world_size / group_size) as f64;
    let mut moved = Traffic::default();
    for event in placed.events() {
        match event {
            Event::Gather { network, unit, .. } => {
                let is_backbone = unit < placed.network(network).backbone.len();
                let wire = if is_backbone { precision.gather } else { precision.head_gather };
                let unit = placed.unit(network, unit);
                let n_shards = unit.n_shards(group_size);
                if n_shards > 1 {
                    moved.gather_bytes += unit.bytes_moved(wire, group_size) * others_share(n_shards as f64);
                    moved.n_gathers += 1;
                }
            }
            Event::Reduce { unit } => {
                let is_backbone = unit < placed.backbone().len();
                let wire = if is_backbone { precision.reduce } else { precision.head_reduce };
                let unit = placed.unit(StepNetwork::Trained, unit);
                let n_shards = unit.n_shards(group_size) as f64;
                let bytes = unit.bytes_moved(wire, group_size);
                moved.reduce_bytes += bytes * others_share(n_shards);
                // The sum is sent back in f32.
                let shard_bytes = (bytes + unit.bytes_moved(Wire::F32, group_size)) / n_shards;
                moved.replica_bytes += shard_bytes * others_share(n_replicas);
                moved.n_reduces += usize::from(world_size > unit.n_parts);
            }
            Event::Infer { network, unit } => {
                let network = placed.network(StepNetwork::Other(network));
                moved.n_statistics += if network.is_frozen { 0 } else { network.backbone[unit].n_sums };
            }
            Event::InferHeads { network } => {
                let network = placed.network(StepNetwork::Other(network));
                moved.n_statistics += if network.is_frozen { 0 } else { n_head_sums(network) };
                moved.column_bytes += column_bytes(network, placement);
            }
            Event::Forward { unit, .. } | Event::Backward { unit, .. } => {
                moved.n_statistics += placed.backbone()[unit].n_sums;
            }
            Event::Loss => {
                moved.n_statistics += 2 * n_head_sums(&model.trained);
                // Inputs, and the gradients at them.
                moved.column_bytes += 2.0 * column_bytes(&model.trained, placement);
            }
            // It has the totals of its first run.
            Event::Repeat { .. } => {}
        }
    }
    for collective in &model.collectives {
        moved.other_bytes += received_bytes(*collective, model, placement);
    }
    if world_size > 1 {
        let with_others = |collective: &&Collective| n_members(**collective, model, placement) > 1;
        moved.n_other = model.collectives.iter().filter(with_others).count() + moved.n_statistics + 1;
    }
    moved
}

/// Returns the share of a buffer that a rank receives from others, if `n` ranks hold equal parts.
fn others_share(n: f64) -> f64 {
    (n - 1.0) / n
}

/// Returns the number of sums of statistics in a pass through the heads of `network`.
fn n_head_sums(network: &NetworkCost) -> usize {
    network.head.iter().map(|unit| unit.n_sums).sum()
}

/// Returns the bytes of the inputs of divided heads that a rank receives from its column group.
fn column_bytes(network: &NetworkCost, placement: &Placement) -> f64 {
    let mut bytes = 0.0;
    for unit in &network.head {
        let images = ((unit.n_parts - 1) * placement.rank_batch) as f64;
        bytes += images * unit.input.wide * Wire::F32.bytes() as f64;
    }
    bytes
}

/// Returns the number of ranks that take part in a collective: all, or all with the same columns.
fn n_members(collective: Collective, model: &ModelCost, placement: &Placement) -> usize {
    match collective {
        Collective::ColumnSum(_) | Collective::SumOfShares(_) => {
            placement.world_size / placement.n_parts(model)
        }
        Collective::Sum(_) | Collective::Number | Collective::Gather(_) => placement.world_size,
    }
}

/// Returns the bytes that a rank receives in a collective.
fn received_bytes(collective: Collective, model: &ModelCost, placement: &Placement) -> f64 {
    let n_ranks = n_members(collective, model, placement);
    let n_values = match collective {
        Collective::Sum(n_values) | Collective::SumOfShares(n_values) => n_values,
        Collective::ColumnSum(n_values) => n_values / placement.n_parts(model),
        Collective::Number => return if n_ranks == 1 { 0.0 } else { NUMBER_BYTES },
        Collective::Gather(n_values) => {
            return (n_values * placement.rank_batch * (n_ranks - 1) * Wire::F32.bytes()) as f64;
        }
    };
    // Every rank adds up a part, and sends the sum to all others.
    (2 * n_values.div_ceil(n_ranks) * (n_ranks - 1) * Wire::F32.bytes()) as f64
}
