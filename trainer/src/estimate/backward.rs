//! Memory of the backward pass through the trained backbone, from the last unit to the first.

use super::UnitCost;
use super::gathered::GatheredWeights;
use super::placed::{F32, PlacedModel};

/// The backward pass on a rank.
pub(super) struct BackwardPass<'a> {
    pub(super) placed: PlacedModel<'a>,
    pub(super) gathered: &'a GatheredWeights,
}

/// Gradients of the units whose backward pass is done.
struct EarlierGradients {
    newest: UnitGradient,
    /// Bytes by which the gradient before the newest exceeds its shard while it is in transfer.
    before_bytes: f64,
    /// Bytes of the shards of all gradients but the newest.
    reduced_bytes: f64,
}

/// Gradient of a unit, or of all heads.
struct UnitGradient {
    /// Bytes before it is sent.
    held_bytes: f64,
    /// Bytes while ranks exchange it and add it up.
    in_transfer_bytes: f64,
    /// Bytes of this rank's shard of the sum.
    shard_bytes: f64,
}

impl EarlierGradients {
    /// Bytes while the backward pass of `unit` runs; `gathers_next` where the weights of the unit
    /// after it are gathered meanwhile.
    fn running_bytes(&self, unit: &UnitCost, gathers_next: bool) -> f64 {
        // The first sum of the unit waits until the gradient before the newest is there.
        let before_sums = self.newest.held_bytes + self.before_bytes;
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
    /// by then, where links are fast.
    fn at_end_bytes(&self) -> f64 {
        self.reduced_bytes + self.newest.in_transfer_bytes
    }

    /// Adds the gradient of the next unit.
    fn push(&mut self, gradient: UnitGradient) {
        let before = std::mem::replace(&mut self.newest, gradient);
        self.reduced_bytes += before.shard_bytes;
        self.before_bytes = before.in_transfer_bytes - before.shard_bytes;
    }
}

impl BackwardPass<'_> {
    /// Returns the largest number of bytes by which the backward pass exceeds gathered weights,
    /// kept inputs and kept graphs, all together; 0 if it never does.
    pub(super) fn peak_bytes(&self) -> f64 {
        let placed = self.placed;
        let backbone = placed.backbone();
        let segments = placed.segments();
        let mut earlier =
            EarlierGradients { newest: self.gradient_of_heads(), before_bytes: 0.0, reduced_bytes: 0.0 };
        // Bytes that were released by units whose backward pass is done.
        let mut freed = 0.0;
        let mut peak = 0.0_f64;
        for (number, unit) in backbone.iter().enumerate().rev() {
            let unused = self.gathered.free_bytes[number];
            let gathers_next = number > 0 && self.gathered.are_gathered_again[number - 1];
            let running =
                self.running_gradient_bytes(unit) + earlier.running_bytes(unit, gathers_next) - unused;
            if placed.keeps_graph(number) {
                peak = peak.max(running - freed);
                freed += placed.graph_bytes(unit, placed.n_images());
            } else {
                if segments.keeps_input(number + 1) {
                    // The inputs of its segment, which the first run has not kept.
                    let start = number - number % segments.len;
                    let inputs = backbone[start + 1..=number].iter();
                    freed -= inputs.map(|unit| placed.input_bytes(unit)).sum::<f64>();
                }
                peak = peak.max(self.recomputed_bytes(number) + running - freed);
                let is_first = segments.keeps_input(number);
                freed += if is_first { placed.kept_bytes(unit) } else { placed.input_bytes(unit) };
            }
            // The graph is gone; the weights are still there, and so is the gradient at the input.
            let flat = self.flat_gradient_bytes(unit) + placed.given_bytes(unit);
            peak = peak.max(flat + earlier.at_end_bytes() - unused - freed);
            freed += self.gathered.kept_bytes[number];
            earlier.push(self.gradient_of_unit(unit));
        }
        peak.max(earlier.at_end_bytes() - freed)
    }

    /// Bytes of the graph of unit `number`, which runs again, and of the gradients at its output
    /// and its input.
    fn recomputed_bytes(&self, number: usize) -> f64 {
        let placed = self.placed;
        let unit = &placed.backbone()[number];
        let output = placed.backbone().get(number + 1).map_or(0.0, |next| placed.given_bytes(next));
        let given = placed.given_bytes(unit);
        let n_micro_batches = placed.placement.rank_micro_batches.max(1) as f64;
        // Between the stages of a unit the graphs are those of all images, and so are the gradients
        // between parts.
        let has_stages = unit.n_sums > 0;
        if has_stages || unit.given != unit.input {
            let at_once = if has_stages { placed.n_images() } else { placed.micro_batch() };
            return placed.graph_bytes(unit, at_once) + output + given;
        }
        // The gradients at the output of one micro-batch after another become gradients at the
        // input.
        let gradients = (output + given / n_micro_batches).max(output / n_micro_batches + given);
        placed.graph_bytes(unit, placed.micro_batch()) + gradients
    }

    /// Bytes of the gradient of a unit while its backward pass runs. Every worker has that of its
    /// slice, by parameter, beside the sums of earlier micro-batches.
    fn running_gradient_bytes(&self, unit: &UnitCost) -> f64 {
        let placement = self.placed.placement;
        let sums = partial_sums(placement.rank_micro_batches) as f64 * self.placed.padded(unit);
        F32 * (sums + (placement.workers * unit.gradients_at_once) as f64)
    }

    /// Bytes of the gradient of a unit at the end of its backward pass: the sum of all, by
    /// parameter, and a copy of it as one flat buffer, in the type in which it is sent. Where that
    /// is not f32, each parameter's sum is freed when it has been rounded.
    fn flat_gradient_bytes(&self, unit: &UnitCost) -> f64 {
        let sent = self.sent_bytes();
        (F32 + if sent < F32 { sent / 2.0 } else { sent }) * self.placed.padded(unit)
    }

    /// The gradients of all heads, which wait for the first unit of the backbone that computes.
    /// They are sent one after another; on a CPU each gets its buffer to receive when it is sent.
    fn gradient_of_heads(&self) -> UnitGradient {
        let sizes: Vec<f64> =
            self.placed.heads().iter().map(|unit| F32 * self.placed.gathered(unit)).collect();
        let in_transfer = (0..sizes.len()).map(|number| sizes[number] + sizes[number..].iter().sum::<f64>());
        let shards: f64 = self.placed.heads().iter().map(|unit| self.placed.shard(unit)).sum();
        self.gradient(sizes.iter().sum(), in_transfer.fold(0.0, f64::max), F32 * shards)
    }

    /// The gradient of `unit` of the backbone, which is sent and received.
    fn gradient_of_unit(&self, unit: &UnitCost) -> UnitGradient {
        let held = self.sent_bytes() * self.placed.padded(unit);
        self.gradient(held, 2.0 * held, F32 * self.placed.shard(unit))
    }

    /// A gradient, which is not sent where there is one rank.
    fn gradient(&self, held_bytes: f64, in_transfer_bytes: f64, shard_bytes: f64) -> UnitGradient {
        if self.placed.placement.world_size == 1 {
            return UnitGradient { held_bytes: shard_bytes, in_transfer_bytes: shard_bytes, shard_bytes };
        }
        UnitGradient { held_bytes, in_transfer_bytes: in_transfer_bytes.max(shard_bytes), shard_bytes }
    }

    /// Bytes of an element of a gradient of the backbone as it is sent.
    fn sent_bytes(&self) -> f64 {
        self.placed.placement.precision.reduce.dtype().size() as f64
    }
}

/// Returns the number of partial sums held while the next of `n` parts is computed, in the order of
/// [`ranks::ordered`]: one for each halving, and one for the sequence.
pub(super) fn partial_sums(n: usize) -> usize {
    let halvings = n.max(1).trailing_zeros();
    halvings as usize + usize::from(n >> halvings > 1)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;
    use ranks::ordered::fold;

    /// The estimate equals the number of parts that are alive while parts are summed.
    #[test]
    fn partial_sums_are_those_of_the_order() {
        for n in [1, 2, 3, 4, 6, 7, 8, 12, 64] {
            let alive = Rc::new(());
            let most = Cell::new(0);
            let mut part = |_: usize| {
                // `alive` itself is not a part.
                most.set(most.get().max(Rc::strong_count(&alive) - 1));
                Rc::clone(&alive)
            };
            drop(fold(n, &mut part, &|a: Rc<()>, _: Rc<()>| a));
            assert_eq!(partial_sums(n), most.get(), "{n}");
        }
    }
}
