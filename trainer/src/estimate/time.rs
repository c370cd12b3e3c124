//! Traffic and time of a step, by the alpha-beta model: every message costs a latency, every byte its share
//! of the bandwidth.

use networks::layout::ALIGNMENT;
use ranks::topology::Sharding;
use ranks::wire::Wire;

use super::{ModelCost, NetworkCost, Placement};

/// Interconnect of the ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fabric {
    /// Number of ranks on a node.
    pub ranks_per_node: usize,
    /// Bytes per second between ranks of a node, for each rank.
    pub local_bytes_per_s: f64,
    /// Bytes per second between nodes, for each node.
    pub node_bytes_per_s: f64,
    /// Latency of a message within a node, in seconds.
    pub local_latency_s: f64,
    /// Latency of a message between nodes, in seconds.
    pub node_latency_s: f64,
}

/// Bytes that a rank receives in a step, and the number of collectives.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traffic {
    /// Bytes of gathered weights.
    pub gather_bytes: f64,
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
    let (groups, replicas) =
        (placement.group_size as f64, (placement.world_size / placement.group_size) as f64);
    let bytes = |units: &[super::UnitCost], wire: Wire| -> f64 {
        let padded = |unit: &super::UnitCost| unit.numel.next_multiple_of(ALIGNMENT * placement.group_size);
        units.iter().map(|unit| (padded(unit) * wire.bytes()) as f64).sum()
    };
    let trained = &model.trained;
    let n_backbone = trained.backbone.len();
    let again = match placement.sharding {
        Sharding::Full => &trained.backbone[..n_backbone.saturating_sub(placement.keep)],
        _ => &[],
    };
    let once = |network: &NetworkCost| {
        bytes(&network.backbone, precision.gather) + bytes(&network.head, precision.head_gather)
    };
    let gathered = model.networks().map(once).sum::<f64>() + bytes(again, precision.gather);
    let reduced = bytes(&trained.backbone, precision.reduce) + bytes(&trained.head, precision.head_reduce);
    let whole = bytes(&trained.backbone, Wire::F32) + bytes(&trained.head, Wire::F32);
    let share = |n: f64| (n - 1.0) / n;
    Traffic {
        gather_bytes: gathered * share(groups),
        n_gathers: if placement.gathers() {
            model.networks().map(|network| network.units().count()).sum::<usize>() + again.len()
        } else {
            0
        },
        reduce_bytes: reduced * share(groups),
        n_reduces: if placement.world_size > 1 { trained.units().count() } else { 0 },
        replica_bytes: (reduced + whole) / groups * share(replicas),
    }
}

/// Seconds of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepTime {
    /// Seconds of the computation.
    pub compute_s: f64,
    /// Seconds of the collectives, with rings.
    pub ring_s: f64,
    /// Seconds of the collectives, with trees: latency grows with the logarithm of the number of ranks.
    pub tree_s: f64,
    /// Seconds of the step, with the faster of the two; only the first gather and the last reduction do not overlap.
    pub step_s: f64,
}

/// Returns the floating-point operations of matrix products in a step of one rank: without recomputation, and with
/// that of units that keep no graph.
pub fn step_flops(model: &ModelCost, placement: &Placement) -> [f64; 2] {
    let images = placement.rank_batch as f64;
    let backbone = &model.trained.backbone;
    let again = &backbone[..backbone.len().saturating_sub(placement.keep)];
    let flops = |network: &NetworkCost| network.units().map(|unit| unit.flops).sum::<f64>();
    let once = model.others.iter().map(flops).sum::<f64>() + 3.0 * flops(&model.trained);
    let twice: f64 = again.iter().map(|unit| unit.flops).sum();
    [images * once, images * (once + twice)]
}

/// Estimates the time of a step in which a rank computes for `compute_s`.
pub fn step_time(model: &ModelCost, placement: &Placement, fabric: &Fabric, compute_s: f64) -> StepTime {
    let traffic = traffic(model, placement);
    let within = |bytes: f64, size: usize, n: usize| collective(bytes, size, n, 1, fabric);
    let (ring_a, tree_a) = within(traffic.gather_bytes, placement.group_size, traffic.n_gathers);
    let (ring_b, tree_b) = within(traffic.reduce_bytes, placement.group_size, traffic.n_reduces);
    let n_replicas = placement.world_size / placement.group_size;
    // A sum over replicas is two collectives. All ranks of a shard group run theirs at the same time.
    let (ring_c, tree_c) =
        collective(traffic.replica_bytes, n_replicas, 2 * traffic.n_reduces, placement.group_size, fabric);
    let (ring_s, tree_s) = (ring_a + ring_b + ring_c, tree_a + tree_b + tree_c);
    let n = (traffic.n_gathers + traffic.n_reduces).max(1) as f64;
    let best = ring_s.min(tree_s);
    StepTime { compute_s, ring_s, tree_s, step_s: compute_s.max(best) + 2.0 * best / n }
}

/// Returns the seconds of `n` collectives over `size` ranks, `stride` apart, in which each rank receives `bytes` in
/// total: with rings and with trees.
fn collective(bytes: f64, size: usize, n: usize, stride: usize, fabric: &Fabric) -> (f64, f64) {
    if size < 2 || n == 0 {
        return (0.0, 0.0);
    }
    let per_node = (fabric.ranks_per_node / stride).clamp(1, size);
    let n_nodes = size.div_ceil(per_node);
    let local_s = bytes / fabric.local_bytes_per_s;
    // Data between nodes enters each node once for all of its ranks in the collective, and ranks of
    // other groups on the node share its links.
    let groups_on_node = fabric.ranks_per_node.div_ceil(per_node) as f64;
    let share = (n_nodes - 1) as f64 / n_nodes as f64 / ((size - 1) as f64 / size as f64);
    let node_s = if n_nodes > 1 { bytes * share * groups_on_node / fabric.node_bytes_per_s } else { 0.0 };
    let local_s = if per_node > 1 { local_s } else { 0.0 };
    let ring = (size - n_nodes) as f64 * fabric.local_latency_s + (n_nodes as f64) * fabric.node_latency_s;
    let levels = |n: usize| (n as f64).log2().ceil();
    let tree = levels(per_node) * fabric.local_latency_s + levels(n_nodes) * fabric.node_latency_s;
    let moving = local_s.max(node_s);
    (moving + n as f64 * ring, moving + n as f64 * tree)
}
