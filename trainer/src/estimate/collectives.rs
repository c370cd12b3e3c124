//! Collectives of a step, event by event: traffic adds up their bytes, the timeline their seconds.

use ranks::wire::Wire;

use super::Placement;
use super::fabric::{Members, Pattern, Transfer};
use super::placed::{F32, PlacedModel};
use crate::cost::NetworkCost;
use crate::method::Collective;
use crate::step::events::{Event, StepNetwork};

/// Collectives that the computation of an event waits for, in this order.
#[derive(Default)]
pub(super) struct Waits {
    /// Number of sums of statistics over the batch.
    pub(super) n_sums: usize,
    /// Exchanges within column groups.
    pub(super) columns: Vec<Transfer>,
    /// Collectives of the method.
    pub(super) method: Vec<Transfer>,
    /// Number of sums of statistics in the backward pass of heads.
    pub(super) n_backward_sums: usize,
}

/// Bytes of a number that ranks reduce.
const NUMBER_BYTES: f64 = 8.0;

/// Exchanges of a few numbers within a column group for the targets that a divided head gives: of
/// rows, as with three iterations of Sinkhorn-Knopp, of means and of gauges.
const N_TARGET_SUMS: usize = 5;

/// Returns the gather of the weights of a unit, among neighbors. Its adapters, if it has some, are
/// gathered beside them, both in f32.
pub(super) fn gather(placed: PlacedModel<'_>, network: StepNetwork, unit: usize) -> Transfer {
    let precision = placed.placement.precision;
    let is_backbone = placed.is_backbone(network, unit);
    let wire = if is_backbone { precision.gather } else { precision.head_gather };
    let unit = placed.unit(network, unit);
    let members = Members::neighbors(placed.n_shards(unit));
    let bytes = if unit.has_adapters() {
        F32 * (placed.gathered(unit) + placed.adapters(unit))
    } else {
        wire.bytes() as f64 * placed.gathered(unit)
    };
    Transfer { pattern: Pattern::Gather, members, bytes }
}

/// Returns the collectives by which a gradient is summed, over the ranks of a group, then over
/// replicas: there the sum is sent back in f32.
pub(super) fn reduction(placed: PlacedModel<'_>, unit: usize) -> [Transfer; 3] {
    let Placement { world_size, group_size, precision, exact_sums, .. } = *placed.placement;
    let is_backbone = placed.is_backbone(StepNetwork::Trained, unit);
    let wire = if is_backbone { precision.reduce } else { precision.head_reduce };
    let unit = placed.unit(StepNetwork::Trained, unit);
    let n_shards = placed.n_shards(unit);
    let bytes = wire.bytes() as f64 * placed.gradient(unit);
    let shard_bytes = bytes / n_shards as f64;
    let sum_bytes = F32 * placed.gradient(unit) / n_shards as f64;
    // Sums in a fixed order are exchanges; others are rings, which only f32 has.
    let pattern = if exact_sums || wire != Wire::F32 { Pattern::Exchange } else { Pattern::Gather };
    let replicas = Members { n_ranks: world_size / group_size, run: 1, stride: group_size };
    [
        Transfer { pattern, members: Members::neighbors(n_shards), bytes },
        Transfer { pattern: Pattern::Exchange, members: replicas, bytes: shard_bytes },
        Transfer { pattern: Pattern::Gather, members: replicas, bytes: sum_bytes },
    ]
}

/// Returns a sum of a few numbers over all ranks, whose bytes are not counted.
pub(super) fn small_sum(placed: PlacedModel<'_>) -> Transfer {
    let members = Members::neighbors(placed.placement.world_size);
    Transfer { pattern: Pattern::Numbers, members, bytes: 0.0 }
}

/// Returns the collectives that the computation of an event waits for.
pub(super) fn waits(placed: PlacedModel<'_>, event: Event) -> Waits {
    let mut waits = Waits::default();
    match event {
        Event::Infer { network, unit } => {
            let network = placed.network(StepNetwork::Other(network));
            if !network.is_frozen {
                waits.n_sums = network.backbone[unit].n_sums;
            }
        }
        Event::InferHeads { network } => {
            let network = placed.network(StepNetwork::Other(network));
            if !network.is_frozen {
                waits.n_sums = n_head_sums(network);
            }
            waits.columns = column_exchanges(placed, network, false);
        }
        Event::Forward { unit, .. } | Event::Backward { unit, .. } => {
            waits.n_sums = placed.model.trained.backbone[unit].n_sums;
        }
        Event::Loss => {
            let trained = &placed.model.trained;
            waits.n_sums = n_head_sums(trained);
            waits.columns = column_exchanges(placed, trained, true);
            for collective in &placed.model.collectives {
                waits.method.push(method_transfer(placed, *collective));
            }
            waits.n_backward_sums = waits.n_sums;
        }
        // A unit that is repeated has the totals of its first run.
        Event::Repeat { .. } | Event::Gather { .. } | Event::Reduce { .. } => {}
    }
    waits
}

/// Returns the number of sums of statistics in a pass through the heads of `network`.
fn n_head_sums(network: &NetworkCost) -> usize {
    network.head.iter().map(|unit| unit.n_sums).sum()
}

/// Returns the exchanges within column groups for the divided heads of a network: their inputs,
/// with a graph the gradients at them, and a few numbers of each row.
fn column_exchanges(placed: PlacedModel<'_>, network: &NetworkCost, has_graph: bool) -> Vec<Transfer> {
    let placement = placed.placement;
    let mut transfers = Vec::new();
    for unit in network.head.iter().filter(|unit| (2..=placement.group_size).contains(&unit.n_parts)) {
        let members = Members { n_ranks: unit.n_parts, run: 1, stride: placed.n_shards(unit) };
        let numbers = Transfer { pattern: Pattern::Numbers, members, bytes: 0.0 };
        if has_graph && transfers.is_empty() {
            // The scores of all heads of a micro-batch are completed together.
            transfers = vec![numbers; unit.n_parts * placement.rank_micro_batches];
        }
        let bytes = F32 * unit.input.wide * (unit.n_parts * placement.rank_batch) as f64;
        transfers.push(Transfer { pattern: Pattern::Gather, members, bytes });
        if has_graph {
            transfers.push(Transfer { pattern: Pattern::Exchange, members, bytes });
        }
        // The trained network gives no targets, unless its heads run a second time for that.
        if !has_graph || unit.runs_twice {
            transfers.extend([numbers; N_TARGET_SUMS]);
        }
    }
    transfers
}

/// Returns a collective of the method.
fn method_transfer(placed: PlacedModel<'_>, collective: Collective) -> Transfer {
    let Placement { world_size, group_size, rank_batch, .. } = *placed.placement;
    let n_parts = placed.model.n_parts().min(group_size);
    // Ranks with the same columns are neighbors in each shard group.
    let peers = Members { n_ranks: world_size / n_parts, run: group_size / n_parts, stride: group_size };
    let all = Members::neighbors(world_size);
    match collective {
        Collective::Sum(n_values) => sum(all, n_values),
        Collective::ColumnSum(n_values) => sum(peers, n_values / n_parts),
        Collective::SumOfShares(n_values) => sum(peers, n_values),
        Collective::Number => Transfer { pattern: Pattern::Numbers, members: all, bytes: NUMBER_BYTES },
        Collective::Gather(n_values) => {
            let bytes = F32 * (n_values * rank_batch * world_size) as f64;
            Transfer { pattern: Pattern::Gather, members: all, bytes }
        }
    }
}

/// Returns a sum of `n_values`.
fn sum(members: Members, n_values: usize) -> Transfer {
    Transfer { pattern: Pattern::Sum, members, bytes: F32 * n_values as f64 }
}
