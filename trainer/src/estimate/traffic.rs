//! Bytes that a step moves between ranks.

use ranks::topology::Sharding;
use ranks::wire::Wire;

use super::{ModelCost, NetworkCost, Placement, UnitCost};
use crate::method::Collective;

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
    let precision = placement.precision;
    let group_size = placement.group_size;
    let replicas = (placement.world_size / placement.group_size) as f64;
    let share = |n: f64| (n - 1.0) / n;
    // Received from the other ranks that hold shards.
    let bytes = |units: &[UnitCost], wire: Wire| -> f64 {
        units
            .iter()
            .map(|unit| unit.bytes_moved(wire, group_size) * share(unit.n_shards(group_size) as f64))
            .sum()
    };
    let shards = |units: &[UnitCost], wire: Wire| -> f64 {
        units.iter().map(|unit| unit.bytes_moved(wire, group_size) / unit.n_shards(group_size) as f64).sum()
    };
    let trained = &model.trained;
    let segments = placement.segments(&trained.backbone);
    let again: Vec<UnitCost> = match placement.sharding {
        Sharding::Full => {
            let numbers = segments.recomputed();
            numbers.map(|number| trained.backbone[number].clone()).collect()
        }
        _ => Vec::new(),
    };
    let seeing = || model.networks().filter(|network| network.computes());
    let gathered = seeing()
        .map(|network| {
            bytes(&network.backbone, precision.gather) + bytes(&network.head, precision.head_gather)
        })
        .sum::<f64>()
        + bytes(&again, precision.gather);
    let reduced = bytes(&trained.backbone, precision.reduce) + bytes(&trained.head, precision.head_reduce);
    let over_replicas = shards(&trained.backbone, precision.reduce)
        + shards(&trained.head, precision.head_reduce)
        + shards(&trained.backbone, Wire::F32)
        + shards(&trained.head, Wire::F32);
    let exchanged = |network: &NetworkCost, times: f64| -> f64 {
        network
            .head
            .iter()
            .map(|unit| {
                let images = ((unit.n_parts - 1) * placement.rank_batch) as f64;
                times * images * unit.input.wide * Wire::F32.bytes() as f64
            })
            .sum()
    };
    Traffic {
        column_bytes: exchanged(trained, 2.0)
            + model.others.iter().map(|network| exchanged(network, 1.0)).sum::<f64>(),
        gather_bytes: gathered,
        n_gathers: if placement.gathers() { n_moved(model, group_size) + again.len() } else { 0 },
        reduce_bytes: reduced,
        n_reduces: trained.units().filter(|unit| placement.world_size > unit.n_parts).count(),
        replica_bytes: over_replicas * share(replicas),
        other_bytes: model
            .collectives
            .iter()
            .map(|collective| received_bytes(*collective, model, placement))
            .sum(),
        n_other: n_other(model, placement),
    }
}

/// Returns the number of units of which a rank does not hold all that it computes with, in networks
/// that compute.
fn n_moved(model: &ModelCost, group_size: usize) -> usize {
    let networks = model.networks().filter(|network| network.computes());
    networks.flat_map(NetworkCost::units).filter(|unit| unit.n_shards(group_size) > 1).count()
}

/// Returns [`Traffic::n_other`].
fn n_other(model: &ModelCost, placement: &Placement) -> usize {
    if placement.world_size == 1 {
        return 0;
    }
    model.collectives.iter().filter(|collective| ranks_of(**collective, model, placement) > 1).count()
        + n_statistics(model)
        + 1
}

/// Returns the number of ranks that take part in a collective: all, or all with the same columns.
fn ranks_of(collective: Collective, model: &ModelCost, placement: &Placement) -> usize {
    match collective {
        Collective::ColumnSum(_) | Collective::SumOfShares(_) => {
            placement.world_size / placement.n_parts(model)
        }
        Collective::Sum(_) | Collective::Number | Collective::Gather(_) => placement.world_size,
    }
}

/// Returns the bytes that a rank receives in a collective.
fn received_bytes(collective: Collective, model: &ModelCost, placement: &Placement) -> f64 {
    let n_ranks = ranks_of(collective, model, placement);
    let n_parts = placement.n_parts(model);
    let bytes = |n_values: usize| (n_values * Wire::F32.bytes()) as f64;
    // Every rank adds up a part, and sends the sum to all others.
    let sum = |n_values: usize, n_ranks: usize| 2.0 * bytes(n_values.div_ceil(n_ranks) * (n_ranks - 1));
    match collective {
        Collective::Sum(n_values) => sum(n_values, n_ranks),
        Collective::ColumnSum(n_values) => sum(n_values / n_parts, n_ranks),
        Collective::SumOfShares(n_values) => sum(n_values, n_ranks),
        Collective::Number if n_ranks == 1 => 0.0,
        Collective::Number => NUMBER_BYTES,
        Collective::Gather(n_values) => bytes(n_values * placement.rank_batch * (n_ranks - 1)),
    }
}

/// Returns the number of sums of statistics over the batch: in the trained network forwards and
/// backwards.
pub(crate) fn n_statistics(model: &ModelCost) -> usize {
    let once = |network: &NetworkCost| network.units().map(|unit| unit.n_sums).sum::<usize>();
    let others = model.others.iter().filter(|network| network.computes() && !network.is_frozen);
    2 * once(&model.trained) + others.map(once).sum::<usize>()
}
