//! Memory of the gradients of units whose backward pass is done, until they are shards.
//!
//! One gradient is in transfer beside the newest. This holds for links on which a transfer takes no
//! longer than the pass through a unit; on slower ones there may be two ([`ranks::prefetch`]).

use super::placed::{F32, PlacedModel};
use crate::cost::UnitCost;

/// Gradients of the units whose backward pass is done.
#[derive(Default)]
pub(super) struct EarlierGradients {
    newest: UnitGradient,
    /// Bytes by which the gradient before the newest exceeds its shard while it is in transfer.
    previous_bytes: f64,
    /// Bytes of the shards of all gradients but the newest.
    reduced_bytes: f64,
}

/// Gradient of a unit, or of all heads.
#[derive(Default, Clone, Copy)]
pub(super) struct UnitGradient {
    /// Bytes before it is sent.
    held_bytes: f64,
    /// Bytes while ranks exchange it and add it up.
    in_transfer_bytes: f64,
    /// Bytes of this rank's shard of the sum.
    shard_bytes: f64,
}

impl EarlierGradients {
    /// Bytes while the backward pass of `unit` runs; `gathers_next` if the weights of the next unit
    /// are gathered meanwhile.
    pub(super) fn running_bytes(&self, unit: &UnitCost, gathers_next: bool) -> f64 {
        // The first sum of the unit waits until the gradient before the newest has arrived.
        let before_sums = self.newest.held_bytes + self.previous_bytes;
        let newest = match unit.n_sums {
            0 => self.newest.in_transfer_bytes,
            // The newest is sent after the gather, which takes as long as the last stage of the
            // unit.
            _ if gathers_next => before_sums,
            // It is sent before the last stage.
            _ => before_sums.max(self.newest.in_transfer_bytes),
        };
        self.reduced_bytes + newest
    }

    /// Bytes at the end of the backward pass of a unit. The gradient before the newest has arrived
    /// by then, if links are fast.
    pub(super) fn at_end_bytes(&self) -> f64 {
        self.reduced_bytes + self.newest.in_transfer_bytes
    }

    /// Adds the gradient of the next unit.
    pub(super) fn push(&mut self, gradient: UnitGradient) {
        let previous = std::mem::replace(&mut self.newest, gradient);
        self.reduced_bytes += previous.shard_bytes;
        self.previous_bytes = previous.in_transfer_bytes - previous.shard_bytes;
    }
}

impl UnitGradient {
    /// Returns the gradients of all heads, which wait for the first unit of the backbone that
    /// computes. They are sent one after another; on a CPU each gets its buffer to receive when it
    /// is sent.
    pub(super) fn for_heads(placed: PlacedModel<'_>) -> Self {
        let heads = placed.heads();
        let held_bytes: f64 = heads.iter().map(|unit| F32 * placed.gathered(unit)).sum();
        let mut in_transfer_bytes = 0.0_f64;
        let mut unsent_bytes = held_bytes;
        for unit in heads {
            let bytes = F32 * placed.gathered(unit);
            in_transfer_bytes = in_transfer_bytes.max(bytes + unsent_bytes);
            unsent_bytes -= bytes;
        }
        let n_shards: f64 = heads.iter().map(|unit| placed.shard(unit)).sum();
        Self::new(placed, held_bytes, in_transfer_bytes, F32 * n_shards)
    }

    /// Returns the gradient of `unit` of the backbone, which is sent and received.
    pub(super) fn for_unit(placed: PlacedModel<'_>, unit: &UnitCost) -> Self {
        let held_bytes = sent_bytes(placed) * placed.padded(unit);
        Self::new(placed, held_bytes, 2.0 * held_bytes, F32 * placed.shard(unit))
    }

    /// Returns a gradient, which is not sent if there is one rank.
    fn new(placed: PlacedModel<'_>, held_bytes: f64, in_transfer_bytes: f64, shard_bytes: f64) -> Self {
        if placed.placement.world_size == 1 {
            return Self { held_bytes: shard_bytes, in_transfer_bytes: shard_bytes, shard_bytes };
        }
        Self { held_bytes, in_transfer_bytes: in_transfer_bytes.max(shard_bytes), shard_bytes }
    }
}

/// Returns the bytes of the gradient of a unit while its backward pass runs. Every worker has that
/// of its slice, by parameter, beside the sums of earlier micro-batches.
pub(super) fn running_gradient_bytes(placed: PlacedModel<'_>, unit: &UnitCost) -> f64 {
    let placement = placed.placement;
    let sums = n_partial_sums(placement.rank_micro_batches) as f64 * placed.padded(unit);
    F32 * (sums + (placement.workers * unit.gradients_at_once) as f64)
}

/// Returns the bytes of the gradient of a unit at the end of its backward pass: the sum of all, by
/// parameter, and a copy of it as one flat buffer, in the type in which it is sent. If that is not
/// f32, each parameter's sum is freed when it has been rounded.
pub(super) fn flat_gradient_bytes(placed: PlacedModel<'_>, unit: &UnitCost) -> f64 {
    let sent = sent_bytes(placed);
    (F32 + if sent < F32 { sent / 2.0 } else { sent }) * placed.padded(unit)
}

/// Returns the bytes of an element of a gradient of the backbone as it is sent.
fn sent_bytes(placed: PlacedModel<'_>) -> f64 {
    placed.placement.precision.reduce.dtype().size() as f64
}

/// Returns the number of partial sums held while the next of `n` parts is computed, in the order of
/// [`ranks::ordered`]: one for each halving, and one for the sequence.
pub(super) fn n_partial_sums(n: usize) -> usize {
    let halvings = n.max(1).trailing_zeros();
    halvings as usize + usize::from(n >> halvings > 1)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;
    use ranks::ordered::fold;

    #[test]
    fn partial_sums_are_the_parts_that_are_alive_while_parts_are_summed() {
        for n in [1, 2, 3, 4, 6, 7, 8, 12, 64] {
            let alive = Rc::new(());
            let most = Cell::new(0);
            let mut part = |_: usize| {
                // `alive` itself is not a part.
                most.set(most.get().max(Rc::strong_count(&alive) - 1));
                Rc::clone(&alive)
            };
            drop(fold(n, &mut part, &|a: Rc<()>, _: Rc<()>| a));
            assert_eq!(n_partial_sums(n), most.get(), "{n}");
        }
    }
}
