//! Several sources mixed by shares.
//!
//! The stream is divided into blocks of 1,000 positions. In each block, every source has a number
//! of positions proportional to its share, and a permutation, which depends on the seed and the
//! index of the block, assigns them. The source of any position, and the position within the
//! source, are therefore computed without those before it, and the shares hold in every block.

use std::ops::Range;

use super::permutation::permute;
use crate::hash::mix;

/// Number of positions of a block.
const BLOCK: u64 = 1000;

/// Sources by share.
#[derive(Debug)]
pub(super) struct Mix {
    key: u64,
    /// Number of positions of a block that belong to the sources before each source, and to all.
    starts: Vec<u64>,
}

/// The positions of a block.
#[derive(Debug)]
pub(super) struct Block {
    /// First position after the block.
    pub(super) end: u64,
    /// Positions within each source.
    pub(super) source_ranges: Vec<Range<u64>>,
}

impl Mix {
    /// Creates the mix of sources with these shares, which are positive and need not add up to one.
    pub(super) fn new(seed: u64, shares: &[f64]) -> Self {
        let mut starts = vec![0];
        for n in block_counts(shares) {
            starts.push(starts[starts.len() - 1] + n);
        }
        Self { key: mix(seed ^ 0x006d_6978_6564), starts }
    }

    /// Returns the source of `position`, and the position within the source.
    pub(super) fn locate(&self, position: u64) -> (usize, u64) {
        let block = position / BLOCK;
        let within = position % BLOCK;
        let (source, index) = self.source(block, within);
        (source, block * self.n_positions(source) + index)
    }

    /// Returns the block that holds `position`.
    pub(super) fn block(&self, position: u64) -> Block {
        let block = position / BLOCK;
        let mut source_ranges = Vec::new();
        for source in 0..self.starts.len() - 1 {
            let n = self.n_positions(source);
            source_ranges.push(block * n..(block + 1) * n);
        }
        Block { end: (block + 1) * BLOCK, source_ranges }
    }

    /// Returns the number of positions of each source before `position`.
    pub(super) fn n_given(&self, position: u64) -> Vec<u64> {
        let block = position / BLOCK;
        let mut counts: Vec<u64> =
            (0..self.starts.len() - 1).map(|source| block * self.n_positions(source)).collect();
        for within in 0..position % BLOCK {
            let (source, _) = self.source(block, within);
            counts[source] += 1;
        }
        counts
    }

    /// Returns the source of a position within a block, and its index among those of the source.
    fn source(&self, block: u64, within: u64) -> (usize, u64) {
        let slot = permute(within, BLOCK, mix(self.key.wrapping_add(block)));
        let source = self.starts.partition_point(|start| *start <= slot) - 1;
        (source, slot - self.starts[source])
    }

    /// Returns the number of positions of `source` in a block.
    fn n_positions(&self, source: usize) -> u64 {
        self.starts[source + 1] - self.starts[source]
    }
}

/// Returns the number of positions of each source in a block: the largest remainders are rounded
/// up, and every source has at least one position.
fn block_counts(shares: &[f64]) -> Vec<u64> {
    let total: f64 = shares.iter().sum();
    let exact: Vec<f64> = shares.iter().map(|share| share / total * BLOCK as f64).collect();
    let mut counts: Vec<u64> = exact.iter().map(|share| (share.floor() as u64).max(1)).collect();
    let mut order: Vec<usize> = (0..shares.len()).collect();
    order.sort_by(|a, b| (exact[*b].fract()).total_cmp(&exact[*a].fract()).then(a.cmp(b)));
    let mut next = order.iter().cycle();
    while counts.iter().sum::<u64>() < BLOCK {
        if let Some(source) = next.next() {
            counts[*source] += 1;
        }
    }
    while counts.iter().sum::<u64>() > BLOCK {
        // Sources that were given their first position have taken it from the largest.
        if let Some(largest) = (0..counts.len()).max_by_key(|source| counts[*source]) {
            counts[largest] -= 1;
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every position of every source occurs once, and shares hold in every block.
        #[test]
        fn positions_are_divided_by_shares(
            shares in proptest::collection::vec(0.01f64..10.0, 1..6),
            seed: u64,
        ) {
            let mix = Mix::new(seed, &shares);
            let mut seen = HashSet::new();
            let mut counts = vec![0u64; shares.len()];
            for position in 0..3 * BLOCK {
                if position % 250 == 0 {
                    prop_assert_eq!(mix.n_given(position), counts.clone());
                }
                let (source, within) = mix.locate(position);
                prop_assert!(mix.block(position).source_ranges[source].contains(&within));
                prop_assert!(seen.insert((source, within)));
                counts[source] += 1;
            }
            let total: f64 = shares.iter().sum();
            for (source, (count, share)) in counts.iter().zip(&shares).enumerate() {
                prop_assert!((0..*count).all(|within| seen.contains(&(source, within))));
                let expected = 3.0 * BLOCK as f64 * share / total;
                prop_assert!((*count as f64 - expected).abs() <= 3.0 * shares.len() as f64);
            }
        }
    }
}
