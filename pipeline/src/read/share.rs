//! Share of the stream that one rank reads.
//!
//! Global batch `g` is positions `[g·B, (g+1)·B)`; rank `r` of `W` reads those with
//! `p mod W = r`. `B` belongs to the recipe, not to the machine, so that the union over ranks is
//! the same for every world size.
//!
//! The price of an order that does not depend on the number of ranks is that every node reads every
//! shard in each epoch. A cache as large as the data set pays it once.

use crate::PipelineError;

/// The part of each global batch that one rank reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Index of the rank, below `world_size`.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Number of samples of a global batch.
    pub batch_size: usize,
}

impl Share {
    /// Creates the share of `rank`.
    ///
    /// # Errors
    /// [`PipelineError::UnevenShare`] when the batch size is not divisible by the number of ranks.
    pub fn new(rank: usize, world_size: usize, batch_size: usize) -> Result<Self, PipelineError> {
        if world_size == 0 || rank >= world_size || batch_size == 0 || !batch_size.is_multiple_of(world_size)
        {
            return Err(PipelineError::UnevenShare { batch_size, world_size });
        }
        Ok(Self { rank, world_size, batch_size })
    }

    /// Creates the share of a single rank: the whole of each batch.
    ///
    /// # Errors
    /// [`PipelineError::UnevenShare`] when the batch is empty.
    pub fn solo(batch_size: usize) -> Result<Self, PipelineError> {
        Self::new(0, 1, batch_size)
    }

    /// Returns the number of samples of a batch that this rank reads.
    pub fn len(&self) -> usize {
        self.batch_size / self.world_size
    }

    /// Returns `false`: a share has at least one sample.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the position of this rank's sample `slot` of global batch `batch`.
    pub fn position(&self, batch: u64, slot: usize) -> u64 {
        batch * self.batch_size as u64 + (slot * self.world_size + self.rank) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shares_are_disjoint_and_cover_the_batch(world in 1usize..9, per_rank in 1usize..9,
            batch in 0u64..1000) {
            let size = world * per_rank;
            let mut positions: Vec<u64> = Vec::new();
            for rank in 0..world {
                let share = Share::new(rank, world, size).expect("divides");
                positions.extend((0..share.len()).map(|slot| share.position(batch, slot)));
            }
            positions.sort_unstable();
            let expected: Vec<u64> = (batch * size as u64..(batch + 1) * size as u64).collect();
            prop_assert_eq!(positions, expected);
        }
    }

    #[test]
    fn a_batch_that_does_not_divide_is_refused() {
        let error = Share::new(0, 3, 8).expect_err("8 / 3");
        assert!(matches!(error, PipelineError::UnevenShare { batch_size: 8, world_size: 3 }), "{error}");
    }
}
