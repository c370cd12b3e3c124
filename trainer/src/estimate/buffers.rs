//! Buffers of gathered weights on a rank, followed gather by gather.

use burn_tensor::DType;
use ranks::buffer_pool::{SpareBuffers, word_count};

use super::placed::PlacedModel;
use crate::cost::UnitCost;

/// Bytes of a word of a buffer.
const WORD_BYTES: usize = 4;

/// Buffer of the gathered weights of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WeightBuffer {
    /// Number of 32-bit words; 0 if a rank computes with its own weights.
    n_words: usize,
    /// Whether the weights come from other ranks or from host memory, and their buffer from a pool.
    pub(super) is_moved: bool,
    /// Whether the unit keeps the weights until its backward pass; such buffers are not of the
    /// pool.
    is_kept: bool,
}

/// Buffers in use, kept, and waiting to be used again, by their numbers of words.
#[derive(Default)]
pub(super) struct WeightBuffers {
    spare: SpareBuffers<usize>,
    in_use_words: usize,
    kept_words: usize,
}

impl WeightBuffer {
    /// Returns the buffer of `unit`, of a backbone or of a head.
    pub(super) fn new(placed: PlacedModel<'_>, unit: &UnitCost, is_head: bool, is_kept: bool) -> Self {
        let placement = placed.placement;
        let dtype = if is_head { DType::F32 } else { placement.precision.gathered() };
        // A rank that has all of what it computes with uses its own weights, unless it rounds them.
        let is_moved = placement.offload || unit.n_shards(placement.group_size) > 1;
        let mut n_words = 0;
        if is_moved || dtype != DType::F32 {
            n_words = word_count(placed.gathered(unit) as usize, dtype);
        }
        Self { n_words, is_moved, is_kept }
    }
}

impl WeightBuffers {
    /// Takes a buffer: one that waits, if it is large enough.
    pub(super) fn take(&mut self, buffer: WeightBuffer) -> WeightBuffer {
        if buffer.is_kept {
            self.kept_words += buffer.n_words;
            return buffer;
        }
        let spare = if buffer.is_moved { self.spare.take(buffer.n_words) } else { None };
        let n_words = spare.unwrap_or(buffer.n_words);
        self.in_use_words += n_words;
        WeightBuffer { n_words, ..buffer }
    }

    /// Releases a buffer after the computation, unless it is kept.
    pub(super) fn release(&mut self, buffer: WeightBuffer) {
        if buffer.is_kept {
            return;
        }
        self.in_use_words -= buffer.n_words;
        if buffer.is_moved && buffer.n_words > 0 {
            self.spare.put(buffer.n_words);
        }
    }

    /// Frees a buffer that was kept.
    pub(super) fn free_kept(&mut self, buffer: WeightBuffer) {
        self.kept_words -= buffer.n_words;
    }

    /// Returns the bytes of all buffers.
    pub(super) fn bytes(&self) -> f64 {
        let n_spare: usize = self.spare.iter().sum();
        ((self.in_use_words + self.kept_words + n_spare) * WORD_BYTES) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: WeightBuffer = WeightBuffer { n_words: 10, is_moved: true, is_kept: false };
    const LONG: WeightBuffer = WeightBuffer { n_words: 100, ..SHORT };

    #[test]
    fn a_buffer_that_waits_is_used_again_unless_it_is_far_too_long() {
        let mut buffers = WeightBuffers::default();
        let long = buffers.take(LONG);
        buffers.release(long);
        let again = buffers.take(WeightBuffer { n_words: 90, ..LONG });
        assert_eq!(buffers.bytes(), 400.0);
        buffers.release(again);
        buffers.take(SHORT);
        assert_eq!(buffers.bytes(), 440.0);
    }

    #[test]
    fn kept_weights_and_those_that_are_not_moved_leave_no_buffer() {
        let mut buffers = WeightBuffers::default();
        let kept = buffers.take(WeightBuffer { is_kept: true, ..LONG });
        buffers.release(kept);
        assert_eq!(buffers.bytes(), 400.0);
        buffers.free_kept(kept);
        let rounded = buffers.take(WeightBuffer { is_moved: false, ..LONG });
        buffers.release(rounded);
        assert_eq!(buffers.bytes(), 0.0);
    }
}
