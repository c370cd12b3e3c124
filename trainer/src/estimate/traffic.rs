//! Bytes that a step moves between ranks, added up over its events.

use super::Placement;
use super::collectives::{gather, reduction, waits};
use super::placed::PlacedModel;
use crate::cost::ModelCost;
use crate::step::events::Event;

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

/// Estimates the traffic of a step.
pub fn traffic(model: &ModelCost, placement: &Placement) -> Traffic {
    let placed = PlacedModel { model, placement };
    let mut moved = Traffic::default();
    for event in placed.events() {
        match event {
            Event::Gather { network, unit, .. } => {
                let gather = gather(placed, network, unit);
                moved.gather_bytes += gather.received_bytes();
                // Adapters and the weights that they are added to are gathered one after the other.
                let n_buffers = 1 + usize::from(placed.unit(network, unit).has_adapters());
                moved.n_gathers += if gather.members.n_ranks > 1 { n_buffers } else { 0 };
            }
            Event::Reduce { unit } => {
                let [in_group, exchange, copy] = reduction(placed, unit);
                moved.reduce_bytes += in_group.received_bytes();
                moved.replica_bytes += exchange.received_bytes() + copy.received_bytes();
                let n_ranks = in_group.members.n_ranks * exchange.members.n_ranks;
                moved.n_reduces += usize::from(n_ranks > 1);
            }
            _ => {
                let waits = waits(placed, event);
                moved.n_statistics += waits.n_sums + waits.n_backward_sums;
                for transfer in waits.columns {
                    moved.column_bytes += transfer.received_bytes();
                }
                for transfer in waits.method {
                    moved.other_bytes += transfer.received_bytes();
                    moved.n_other += usize::from(transfer.members.n_ranks > 1);
                }
            }
        }
    }
    if placement.world_size > 1 {
        moved.n_other += moved.n_statistics + 1;
    }
    moved
}
