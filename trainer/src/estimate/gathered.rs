//! Gathered weights on a rank: those that stay until the backward pass, and the buffers that all
//! others share.

use std::iter::repeat_n;

use burn_tensor::DType;
use ranks::buffer_pool::{SpareBuffers, word_count};
use ranks::topology::Sharding;

use super::placed::PlacedModel;
use super::{NetworkCost, UnitCost};

/// Bytes of a word of a buffer.
const WORD_BYTES: usize = 4;

/// Memory of gathered weights.
pub(super) struct GatheredWeights {
    /// Bytes of the weights that stay, by unit of the trained backbone.
    pub(super) kept_bytes: Vec<f64>,
    /// Whether the backward pass waits for the weights from other ranks, by unit of the trained
    /// backbone.
    pub(super) are_gathered_again: Vec<bool>,
    /// Bytes of all buffers that do not stay, at their peak.
    pub(super) transient_bytes: f64,
    /// Bytes of these that are free again in the backward pass of each unit of the trained
    /// backbone; 0 for buffers of a pool, which stay.
    pub(super) free_bytes: Vec<f64>,
}

/// Estimates the memory of gathered weights.
pub(super) fn gathered_weights(placed: PlacedModel<'_>) -> GatheredWeights {
    let backbone = placed.backbone();
    let gathers = gathers(placed);
    let peak_words = peak_words(&gathers);
    let are_all_in_use = placed.placement.segment > 1 || gathers.iter().any(|gather| gather.is_pooled);
    let words = |number: usize| gather_of(placed, &backbone[number], false).n_words;
    let kept = |number: usize| if keeps_weights(placed, number) { words(number) } else { 0 };
    let in_use = |number: usize| words(number) - kept(number);
    // In the backward pass the weights of the unit before are there while one is in use. Segments
    // run in another order, which is not followed.
    let of_two = |number: usize| in_use(number) + number.checked_sub(1).map_or(0, in_use);
    let free = |number: usize| if are_all_in_use { 0 } else { peak_words.saturating_sub(of_two(number)) };
    let bytes = |n_words: usize| (n_words * WORD_BYTES) as f64;
    GatheredWeights {
        are_gathered_again: (0..backbone.len())
            .map(|number: usize| {
                !keeps_weights(placed, number) && gather_of(placed, &backbone[number], false).is_pooled
            })
            .collect(),
        kept_bytes: (0..backbone.len()).map(|number| bytes(kept(number))).collect(),
        transient_bytes: bytes(peak_words),
        free_bytes: (0..backbone.len()).map(|number| bytes(free(number))).collect(),
    }
}

/// A gather of a step whose buffer does not stay.
struct TransientGather {
    /// Number of 32-bit words; 0 where a rank computes with its own weights.
    n_words: usize,
    /// Whether the buffer returns to a pool.
    is_pooled: bool,
    /// Whether it is in use together with the next one, as the units of heads are.
    held_with_next: bool,
}

/// Buffers in use and buffers that wait to be used again, by their numbers of words.
#[derive(Default)]
struct Buffers {
    spare: SpareBuffers<usize>,
    in_use_words: usize,
    peak_words: usize,
}

/// Returns whether the weights of unit `number` of the trained backbone stay from its forward to
/// its backward pass.
fn keeps_weights(placed: PlacedModel<'_>, number: usize) -> bool {
    placed.placement.sharding == Sharding::Grad || placed.keeps_graph(number)
}

/// The gathers of a step in the order of `Weights::gathers` in [`crate::step`]. Gathers whose
/// buffers are kept have 0 words.
fn gathers(placed: PlacedModel<'_>) -> Vec<TransientGather> {
    let backbone = |network: &NetworkCost, keeps: &dyn Fn(usize) -> bool| -> Vec<TransientGather> {
        network
            .backbone
            .iter()
            .enumerate()
            .map(|(number, unit)| {
                if keeps(number) {
                    TransientGather { n_words: 0, is_pooled: false, held_with_next: false }
                } else {
                    gather_of(placed, unit, false)
                }
            })
            .collect()
    };
    let heads = |network: &NetworkCost| -> Vec<TransientGather> {
        let mut list: Vec<TransientGather> =
            network.head.iter().map(|unit| gather_of(placed, unit, true)).collect();
        // The next gather is in transfer while the last unit is in use.
        list.iter_mut().rev().take(1).for_each(|last| last.held_with_next = false);
        list
    };
    let mut list = Vec::new();
    for network in placed.model.others.iter().filter(|network| network.computes()) {
        list.extend(backbone(network, &|_| false));
        list.extend(heads(network));
    }
    list.extend(backbone(&placed.model.trained, &|number| keeps_weights(placed, number)));
    list.extend(heads(&placed.model.trained));
    if placed.placement.sharding != Sharding::Grad {
        for range in placed.segments().ranges().rev() {
            let numbers = (range.start..range.end - 1).chain(range.rev());
            list.extend(numbers.map(|number| gather_of(placed, &placed.backbone()[number], false)));
        }
    }
    list
}

/// The gather of a unit of a backbone, or of a head.
fn gather_of(placed: PlacedModel<'_>, unit: &UnitCost, is_head: bool) -> TransientGather {
    let placement = placed.placement;
    let dtype = if is_head { DType::F32 } else { placement.precision.gathered() };
    // A rank that holds all of what it computes with takes its own weights, unless it rounds them.
    let is_moved = placement.offload || unit.n_shards(placement.group_size) > 1;
    let n_words = word_count(placed.gathered(unit) as usize, dtype);
    let n_words = if is_moved || dtype != DType::F32 { n_words } else { 0 };
    TransientGather { n_words, is_pooled: is_moved, held_with_next: is_head }
}

/// Returns the largest number of words of all buffers together, with one gather ahead of the unit
/// that computes. What one step leaves in the pool, the next one finds.
fn peak_words(gathers: &[TransientGather]) -> usize {
    let mut buffers = Buffers::default();
    for gathers in repeat_n(gathers, 2) {
        let mut held = Vec::new();
        let mut ahead = gathers.first().map(|first| buffers.take(first));
        for (number, gather) in gathers.iter().enumerate() {
            held.extend(ahead.take().map(|words| (words, gather.is_pooled)));
            ahead = gathers.get(number + 1).map(|next| buffers.take(next));
            if !gather.held_with_next {
                held.drain(..).for_each(|(words, is_pooled)| buffers.release(words, is_pooled));
            }
        }
        held.into_iter().for_each(|(words, is_pooled)| buffers.release(words, is_pooled));
    }
    buffers.peak_words
}

impl Buffers {
    /// Takes a buffer, and returns its number of words.
    fn take(&mut self, gather: &TransientGather) -> usize {
        let spare = if gather.is_pooled { self.spare.take(gather.n_words) } else { None };
        let words = spare.unwrap_or(gather.n_words);
        self.in_use_words += words;
        self.peak_words = self.peak_words.max(self.in_use_words + self.spare.iter().sum::<usize>());
        words
    }

    fn release(&mut self, words: usize, is_pooled: bool) {
        self.in_use_words -= words;
        if is_pooled && words > 0 {
            self.spare.put(words);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_words(n_words: usize) -> TransientGather {
        TransientGather { n_words, is_pooled: true, held_with_next: false }
    }

    fn of_head(n_words: usize) -> TransientGather {
        TransientGather { held_with_next: true, ..of_words(n_words) }
    }

    #[test]
    fn one_gather_is_ahead_of_the_unit_that_computes() {
        let units = [100, 90, 80].map(of_words);
        // 80 takes the buffer of 100, which is free when it is gathered.
        assert_eq!(peak_words(&units), 190);
        assert_eq!(peak_words(&units[..1]), 100);
        assert_eq!(peak_words(&[]), 0);
    }

    #[test]
    fn units_of_heads_are_in_use_together() {
        let gathers = || [of_head(100), of_words(100), of_words(100), of_words(100)];
        // Two units of heads, and the next unit in transfer: they are released before another one
        // is gathered.
        assert_eq!(peak_words(&gathers()), 300);
        let [first, second, ..] = gathers();
        let last = TransientGather { held_with_next: true, ..second };
        assert_eq!(peak_words(&[first, last, of_words(100), of_words(100)]), 400);
    }

    #[test]
    fn a_buffer_that_is_far_too_large_stays_free() {
        let gathers = [of_words(100), of_words(100), of_words(10), of_words(10)];
        assert_eq!(peak_words(&gathers), 220);
    }

    #[test]
    fn what_stays_between_two_units_lets_them_share_a_buffer() {
        let stays = || TransientGather { n_words: 0, is_pooled: false, held_with_next: false };
        assert_eq!(peak_words(&[of_words(100), stays(), of_words(100)]), 100);
        assert_eq!(peak_words(&[of_words(100), of_words(100)]), 200);
    }

    #[test]
    fn rounded_weights_of_one_rank_are_freed_one_after_another() {
        let gathers =
            [10, 90, 80, 70].map(|n_words| TransientGather { is_pooled: false, ..of_words(n_words) });
        assert_eq!(peak_words(&gathers), 170);
    }
}
