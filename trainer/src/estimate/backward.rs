//! Memory of the backward pass through the trained backbone, from the last unit to the first.

use super::UnitCost;
use super::gathered::GatheredWeights;
use super::placed::{F32, PlacedModel};

/// The backward pass on a rank.
pub(super) struct BackwardPass<'a> {
    pub(super) placed: PlacedModel<'a>,
    pub(super) gathered: &'a GatheredWeights,
}

/// The newest gradient.
struct NewestGradient {
    /// Bytes while ranks exchange it and add it up.
    in_transfer_bytes: f64,
    /// Bytes of this rank's shard of the sum.
    shard_bytes: f64,
}

impl BackwardPass<'_> {
    /// Returns the largest number of bytes by which the backward pass exceeds gathered weights, kept inputs and kept graphs, all together;
    /// 0 if it never does.
    pub(super) fn peak_bytes(&self) -> f64 {
        let placed = self.placed;
        let (backbone, segments) = (placed.backbone(), placed.segments());
        // `freed` are bytes that were released by units whose backward pass is done, `reduced` the shards of their gradients without
        // the newest, which alone is in transfer where links are fast.
        let (mut freed, mut reduced, mut peak) = (0.0, 0.0, 0.0_f64);
        let mut newest = self.gradient_of_heads();
        for (number, unit) in backbone.iter().enumerate().rev() {
            let gradients = self.gradient_bytes(unit) + reduced + newest.in_transfer_bytes;
            if placed.keeps_graph(number) {
                peak = peak.max(gradients - freed);
                freed += placed.graph_bytes(unit, placed.n_images());
            } else {
                if segments.keeps_input(number + 1) {
                    // The inputs of its segment, which the first run has not kept.
                    let start = number - number % segments.len;
                    let inputs = backbone[start + 1..=number].iter();
                    freed -= inputs.map(|unit| placed.input_bytes(unit)).sum::<f64>();
                }
                peak = peak.max(self.recomputed_bytes(number) + gradients - freed);
                let is_first = segments.keeps_input(number);
                freed += if is_first { placed.kept_bytes(unit) } else { placed.input_bytes(unit) };
            }
            freed += self.gathered.kept_bytes[number];
            reduced += newest.shard_bytes;
            newest = self.gradient_of_unit(unit);
        }
        peak.max(reduced + newest.in_transfer_bytes - freed)
    }

    /// Bytes of the graph of unit `number`, which runs again, and of the gradients at its output and its input.
    fn recomputed_bytes(&self, number: usize) -> f64 {
        let placed = self.placed;
        let unit = &placed.backbone()[number];
        let output = placed.backbone().get(number + 1).map_or(0.0, |next| placed.given_bytes(next));
        let given = placed.given_bytes(unit);
        let n_micro_batches = placed.placement.rank_micro_batches.max(1) as f64;
        // Between the stages of a unit the graphs are those of all images, and so are the gradients between parts.
        let has_stages = unit.n_sums > 0;
        if has_stages || unit.given != unit.input {
            let at_once = if has_stages { placed.n_images() } else { placed.micro_batch() };
            return placed.graph_bytes(unit, at_once) + output + given;
        }
        // The gradients at the output of one micro-batch after another become gradients at the input.
        let gradients = (output + given / n_micro_batches).max(output / n_micro_batches + given);
        placed.graph_bytes(unit, placed.micro_batch()) + gradients
    }

    /// Bytes of the gradient of a unit. Every worker has that of its slice, by parameter, beside the sums of earlier
    /// micro-batches; at the end there are the sum of all and a copy of it as one flat buffer, in the type in which it is sent. Where
    /// that is not f32, each parameter's sum is freed when it has been rounded.
    fn gradient_bytes(&self, unit: &UnitCost) -> f64 {
        let placement = self.placed.placement;
        let sums = F32 * (placement.workers + partial_sums(placement.rank_micro_batches)) as f64;
        let of_gradient = self.sent_bytes();
        let at_end = if of_gradient < F32 { F32 + of_gradient / 2.0 } else { F32 + of_gradient };
        sums.max(at_end) * self.placed.padded(unit)
    }

    /// The gradients of all heads, which wait for the first unit of the backbone that computes.
    fn gradient_of_heads(&self) -> NewestGradient {
        let sizes = self.placed.heads().iter().map(|unit| self.placed.gathered(unit));
        let in_transfer = F32 * (sizes.clone().sum::<f64>() + sizes.fold(0.0, f64::max));
        let shards: f64 = self.placed.heads().iter().map(|unit| self.placed.shard(unit)).sum();
        self.gradient(in_transfer, F32 * shards)
    }

    /// The gradient of `unit` of the backbone, which is sent and received.
    fn gradient_of_unit(&self, unit: &UnitCost) -> NewestGradient {
        let in_transfer = 2.0 * self.sent_bytes() * self.placed.padded(unit);
        self.gradient(in_transfer, F32 * self.placed.shard(unit))
    }

    /// A gradient, which is not sent where there is one rank.
    fn gradient(&self, in_transfer_bytes: f64, shard_bytes: f64) -> NewestGradient {
        let is_alone = self.placed.placement.world_size == 1;
        let in_transfer_bytes = if is_alone { shard_bytes } else { in_transfer_bytes.max(shard_bytes) };
        NewestGradient { in_transfer_bytes, shard_bytes }
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
            let (alive, most) = (Rc::new(()), Cell::new(0));
            let mut part = |_: usize| {
                // `alive` itself is not a part.
                most.set(most.get().max(Rc::strong_count(&alive) - 1));
                Rc::clone(&alive)
            };
            let sum = |a: Rc<()>, _: Rc<()>| a;
            drop(fold(n, &mut part, &sum));
            assert_eq!(partial_sums(n), most.get(), "{n}");
        }
    }
}
