//! Memory of the gradients of units whose backward pass is done, until they are shards.
//!
//! One gradient is in transfer beside the newest. This holds for links on which a transfer takes no
//! longer than the pass through a unit; on slower ones there may be two ([`ranks::in_flight`]).

use super::placed::{F32, PlacedModel};
use crate::cost::UnitCost;

/// Gradients of the units whose backward pass is done, or of all heads.
#[derive(Default)]
pub(super) struct EarlierGradients {
    /// Bytes of the newest before it is sent.
    held_bytes: f64,
    /// Bytes of the newest while ranks exchange it and add it up.
    in_transfer_bytes: f64,
    /// Bytes of this rank's shard of the newest.
    shard_bytes: f64,
    /// Bytes by which the gradient before the newest exceeds its shard while it is in transfer.
    previous_bytes: f64,
    /// Bytes of the shards of all gradients but the newest.
    reduced_bytes: f64,
}

impl EarlierGradients {
    /// Bytes while the backward pass of `unit` runs; `gathers_next` if the weights of the next unit
    /// are gathered meanwhile.
    pub(super) fn running_bytes(&self, unit: &UnitCost, gathers_next: bool) -> f64 {
        // The first sum of the unit waits until the gradient before the newest has arrived.
        let before_sums = self.held_bytes + self.previous_bytes;
        let newest = match unit.n_sums {
            0 => self.in_transfer_bytes,
            // The newest is sent after the gather, which takes as long as the last stage of the
            // unit.
            _ if gathers_next => before_sums,
            // It is sent before the last stage.
            _ => before_sums.max(self.in_transfer_bytes),
        };
        self.reduced_bytes + newest
    }

    /// Bytes at the end of the backward pass of a unit. The gradient before the newest has arrived
    /// by then, if links are fast.
    pub(super) fn at_end_bytes(&self) -> f64 {
        self.reduced_bytes + self.in_transfer_bytes
    }

    /// Adds the gradients of all heads, which wait for the first unit of the backbone that
    /// computes. They are sent one after another; on a CPU each gets its buffer to receive when it
    /// is sent.
    pub(super) fn push_heads(&mut self, placed: PlacedModel<'_>) {
        let mut shard_bytes = 0.0;
        let mut held_bytes = 0.0;
        let mut in_transfer_bytes = 0.0_f64;
        // From the last to the first: those after one are still to be sent when it is.
        for unit in placed.model.trained.head.iter().rev() {
            let bytes = F32 * placed.gathered(unit);
            shard_bytes += F32 * placed.shard(unit);
            held_bytes += bytes;
            in_transfer_bytes = in_transfer_bytes.max(bytes + held_bytes);
        }
        self.push(placed, held_bytes, in_transfer_bytes, shard_bytes);
    }

    /// Adds the gradient of the next unit of the backbone, which is sent and received.
    pub(super) fn push_unit(&mut self, placed: PlacedModel<'_>, unit: &UnitCost) {
        let held_bytes = placed.placement.precision.reduce.bytes() as f64 * placed.gradient(unit);
        self.push(placed, held_bytes, 2.0 * held_bytes, F32 * placed.trained_shard(unit));
    }

    fn push(&mut self, placed: PlacedModel<'_>, held_bytes: f64, in_transfer_bytes: f64, shard_bytes: f64) {
        self.previous_bytes = self.in_transfer_bytes - self.shard_bytes;
        self.reduced_bytes += self.shard_bytes;
        self.shard_bytes = shard_bytes;
        // One rank sends nothing.
        let is_sent = placed.placement.world_size > 1;
        self.held_bytes = if is_sent { held_bytes } else { shard_bytes };
        self.in_transfer_bytes = if is_sent { in_transfer_bytes.max(shard_bytes) } else { shard_bytes };
    }
}
