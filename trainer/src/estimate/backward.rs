//! Memory of the backward pass through the trained backbone, from the last unit to the first.

use super::UnitCost;
use super::gathered::GatheredWeights;
use super::placed::PlacedModel;

/// Bytes of an element of a gradient on a rank.
const F32: f64 = 4.0;

/// The backward pass on a rank.
pub(super) struct BackwardPass<'a> {
    pub(super) placed: PlacedModel<'a>,
    pub(super) gathered: &'a GatheredWeights,
}

/// The gradient that was computed last.
struct LastGradient {
    /// Bytes while ranks exchange it and add it up.
    in_transfer_bytes: f64,
    /// Bytes of this rank's shard of the sum.
    shard_bytes: f64,
}

impl BackwardPass<'_> {
    /// Returns the bytes beyond those of gathered weights, all inputs and all kept graphs, at their peak.
    pub(super) fn peak_bytes(&self) -> f64 {
        let placed = self.placed;
        let (backbone, segments) = (placed.backbone(), placed.segments());
        // `freed` is what the units behind held, `reduced` the shards of their gradients, but for the last.
        let (mut freed, mut reduced, mut peak) = (0.0, 0.0, 0.0_f64);
        let mut last = self.last_of_heads();
        for (number, unit) in backbone.iter().enumerate().rev() {
            let gradients = self.gradient_bytes(unit) + reduced + last.in_transfer_bytes;
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
                peak = peak.max(self.again_bytes(number) + gradients - freed);
                let is_first = segments.keeps_input(number);
                freed += if is_first { placed.kept_bytes(unit) } else { placed.input_bytes(unit) };
            }
            freed += self.gathered.kept_bytes[number];
            reduced += last.shard_bytes;
            last = self.last_of_backbone(unit);
        }
        peak.max(reduced + last.in_transfer_bytes - freed)
    }

    /// Bytes of the graph of unit `number`, which runs again, and of the gradients at its output and its input.
    fn again_bytes(&self, number: usize) -> f64 {
        let placed = self.placed;
        let unit = &placed.backbone()[number];
        let output = placed.backbone().get(number + 1).map_or(0.0, |next| placed.given_bytes(next));
        // Between the stages of a unit the graphs are those of all images, and so are the gradients between parts.
        let has_stages = unit.n_sums > 0;
        let at_once = if has_stages { placed.n_images() } else { placed.micro_batch() };
        let is_part = unit.given != unit.input;
        let at_input = if has_stages || is_part { placed.n_images() } else { placed.micro_batch() };
        let given = unit.given.bytes(placed.placement.precision.types()) * at_input;
        placed.graph_bytes(unit, at_once) + output + given
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
    fn last_of_heads(&self) -> LastGradient {
        let sizes = self.placed.heads().iter().map(|unit| self.placed.gathered(unit));
        let in_transfer = F32 * (sizes.clone().sum::<f64>() + sizes.fold(0.0, f64::max));
        let shards: f64 = self.placed.heads().iter().map(|unit| self.placed.shard(unit)).sum();
        self.last(in_transfer, F32 * shards)
    }

    /// The gradient of `unit` of the backbone, which is sent and received.
    fn last_of_backbone(&self, unit: &UnitCost) -> LastGradient {
        let in_transfer = 2.0 * self.sent_bytes() * self.placed.padded(unit);
        self.last(in_transfer, F32 * self.placed.shard(unit))
    }

    /// A gradient, which is not sent where there is one rank.
    fn last(&self, in_transfer_bytes: f64, shard_bytes: f64) -> LastGradient {
        let is_alone = self.placed.placement.world_size == 1;
        let in_transfer_bytes = if is_alone { shard_bytes } else { in_transfer_bytes.max(shard_bytes) };
        LastGradient { in_transfer_bytes, shard_bytes }
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
