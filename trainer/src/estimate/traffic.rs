//! Bytes that a step moves between ranks.

use ranks::topology::Sharding;
use ranks::wire::Wire;

use super::{ModelCost, NetworkCost, Placement, UnitCost};

/// Bytes that a rank receives in a step, and the number of collectives.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traffic {
    /// Bytes of gathered weights.
    pub gather_bytes: f64,
    /// Bytes of inputs and gradients of units whose columns are divided, within column groups.
    pub exchanged_bytes: f64,
    /// Number of gathers.
    pub n_gathers: usize,
    /// Bytes of gradients within shard groups.
    pub reduce_bytes: f64,
    /// Number of reductions.
    pub n_reduces: usize,
    /// Bytes of gradients between replicas.
    pub replica_bytes: f64,
}

/// Estimates the traffic of a step.
pub fn traffic(model: &ModelCost, placement: &Placement) -> Traffic {
    let precision = placement.precision;
    let (group_size, replicas) = (placement.group_size, (placement.world_size / placement.group_size) as f64);
    let share = |n: f64| (n - 1.0) / n;
    // Received from the other ranks that hold shards.
    let bytes = |units: &[UnitCost], wire: Wire| -> f64 {
        let of_unit =
            |unit: &UnitCost| unit.bytes_moved(wire, group_size) * share(unit.n_shards(group_size) as f64);
        units.iter().map(of_unit).sum()
    };
    let shards = |units: &[UnitCost], wire: Wire| -> f64 {
        let of_unit = |unit: &UnitCost| unit.bytes_moved(wire, group_size) / unit.n_shards(group_size) as f64;
        units.iter().map(of_unit).sum()
    };
    let trained = &model.trained;
    let segments = placement.segments(&trained.backbone);
    let again: Vec<UnitCost> = match placement.sharding {
        Sharding::Full => {
            let numbers = segments.again();
            numbers.map(|number| trained.backbone[number].clone()).collect()
        }
        _ => Vec::new(),
    };
    let once = |network: &NetworkCost| {
        bytes(&network.backbone, precision.gather) + bytes(&network.head, precision.head_gather)
    };
    let seeing = || model.networks().filter(|network| network.computes());
    let gathered = seeing().map(once).sum::<f64>() + bytes(&again, precision.gather);
    let reduced = bytes(&trained.backbone, precision.reduce) + bytes(&trained.head, precision.head_reduce);
    let over_replicas = shards(&trained.backbone, precision.reduce)
        + shards(&trained.head, precision.head_reduce)
        + shards(&trained.backbone, Wire::F32)
        + shards(&trained.head, Wire::F32);
    let exchanged = |network: &NetworkCost, times: f64| -> f64 {
        let of_unit = |unit: &UnitCost| {
            let images = ((unit.n_parts - 1) * placement.rank_batch) as f64;
            times * images * unit.input.wide * Wire::F32.bytes() as f64
        };
        network.head.iter().map(of_unit).sum()
    };
    Traffic {
        exchanged_bytes: exchanged(trained, 2.0)
            + model.others.iter().map(|network| exchanged(network, 1.0)).sum::<f64>(),
        gather_bytes: gathered,
        n_gathers: if placement.gathers() {
            seeing().map(|network| network.units().count()).sum::<usize>() + again.len()
        } else {
            0
        },
        reduce_bytes: reduced,
        n_reduces: if placement.world_size > 1 { trained.units().count() } else { 0 },
        replica_bytes: over_replicas * share(replicas),
    }
}
