//! The order of the data: a pure function from position to sample.
//!
//! Positions count samples in one endless stream. A data set of one source is read in epochs
//! ([`super::epochs`]). Several sources are mixed by their shares ([`super::mix`]), each read in
//! epochs of its own. The order does not depend on the world size, and starting at any position
//! costs no more than the shard permutation of its epoch.

use std::collections::HashSet;

use super::epochs::Epochs;
use super::mix::Mix;
use super::place::{Lookahead, Place};
use super::sampling::Sampling;
use crate::Dataset;
use crate::hash::mix;

/// The order of one data set under one seed.
#[derive(Debug)]
pub struct Order {
    streams: Vec<Stream>,
    /// `None` if there is one stream.
    mix: Option<Mix>,
}

/// A source in its own order.
#[derive(Debug)]
struct Stream {
    epochs: Epochs,
    /// Number of shards before those of the source, in the list of all.
    first_shard: usize,
}

impl Order {
    /// Creates the order of shards with `shard_sizes` samples each. A `window_shards` of zero
    /// counts as one.
    pub fn new(seed: u64, shard_sizes: Vec<u64>, window_shards: usize) -> Self {
        let epochs = Epochs::new(seed, shard_sizes, window_shards);
        Self { streams: vec![Stream { epochs, first_shard: 0 }], mix: None }
    }

    /// Creates the order of `dataset`, by its [`Sampling`].
    pub fn for_dataset(dataset: &Dataset, seed: u64, window_shards: usize) -> Self {
        let sizes = dataset.shard_sizes();
        let sampling = dataset.sampling();
        if *sampling == Sampling::default() {
            return Self::new(seed, sizes, window_shards);
        }
        let counts: Vec<usize> = match sampling.sources.as_slice() {
            [] => vec![sizes.len()],
            sources => sources.iter().map(|source| source.n_shards).collect(),
        };
        let mut streams = Vec::new();
        let mut first_shard = 0;
        let mut first_sample = 0;
        for (index, n_shards) in counts.into_iter().enumerate() {
            let sizes = sizes[first_shard..first_shard + n_shards].to_vec();
            let n_samples = sizes.iter().sum::<u64>() as usize;
            // Sources with as many shards of the same sizes are read in different orders.
            let seed = if index == 0 { seed } else { seed ^ mix(index as u64) };
            let mut epochs = Epochs::new(seed, sizes, window_shards);
            if let Some(weights) = &sampling.weights {
                epochs = epochs.with_weights(&weights[first_sample..first_sample + n_samples]);
            }
            streams.push(Stream { epochs, first_shard });
            first_shard += n_shards;
            first_sample += n_samples;
        }
        let shares: Vec<f64> = sampling.sources.iter().map(|source| source.share).collect();
        Self { streams, mix: (shares.len() > 1).then(|| Mix::new(seed, &shares)) }
    }

    /// Returns the sample at `position` of the endless stream, or, for `attempt > 0`, the
    /// `attempt`-th substitute for it: the sample `attempt` positions further in the same epoch of
    /// the same source, cyclically.
    ///
    /// # Panics
    /// Panics if the data set is empty, which [`crate::Dataset::open`] refuses.
    pub fn place(&self, position: u64, attempt: u64) -> Place {
        let (source, within) = self.mix.as_ref().map_or((0, position), |mix| mix.locate(position));
        let stream = &self.streams[source];
        let place = stream.epochs.place(within, attempt);
        Place { shard: stream.first_shard + place.shard, ..place }
    }

    /// Returns the shards of the window that contains `position`, and of the window after it, for
    /// each source.
    pub fn ahead(&self, position: u64) -> Lookahead {
        let Some(mix) = &self.mix else { return self.streams[0].epochs.ahead(position) };
        let block = mix.block(position);
        let mut shards = Vec::new();
        for (stream, range) in self.streams.iter().zip(&block.source_ranges) {
            let mut position = range.start;
            // Windows up to the end of the block, and the one after it.
            while position < range.end {
                let ahead = stream.epochs.ahead(position);
                shards.extend(ahead.shards.iter().map(|shard| stream.first_shard + shard));
                position = ahead.end;
            }
        }
        let mut seen = HashSet::new();
        shards.retain(|shard| seen.insert(*shard));
        Lookahead { end: block.end, shards }
    }

    /// Returns the number of samples that each source gives up to `position`.
    pub fn n_given(&self, position: u64) -> Vec<u64> {
        self.mix.as_ref().map_or(vec![position], |mix| mix.n_given(position))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use proptest::prelude::*;

    fn mixed_order(shares: &[f64], weights: &[f64]) -> Order {
        let mut streams = Vec::new();
        for source in 0..shares.len() {
            let sizes = vec![7 + source as u64, 5, 9];
            let n = sizes.iter().sum::<u64>() as usize;
            let source_weights: Vec<f64> = (0..n).map(|i| weights[i % weights.len()]).collect();
            let epochs = Epochs::new(source as u64, sizes, 2).with_weights(&source_weights);
            streams.push(Stream { epochs, first_shard: 3 * source });
        }
        Order { streams, mix: Some(Mix::new(5, shares)) }
    }

    proptest! {
        /// Each source is read by its share; shards are announced before they are read; a sample
        /// and its repeat occur once in an epoch.
        #[test]
        fn mixes_are_exact(weights in proptest::collection::vec(0.1f64..9.0, 1..9)) {
            let order = mixed_order(&[0.25, 0.75], &weights);
            let mut ahead = order.ahead(0);
            let mut seen: HashMap<Place, u64> = HashMap::new();
            let mut counts = vec![0, 0];
            for position in 0..2500 {
                if position >= ahead.end {
                    ahead = order.ahead(position);
                }
                let place = order.place(position, 0);
                prop_assert!(ahead.shards.contains(&place.shard));
                prop_assert_eq!(place, mixed_order(&[0.25, 0.75], &weights).place(position, 0));
                *seen.entry(place).or_default() += 1;
                counts[place.shard / 3] += 1;
            }
            prop_assert_eq!(order.n_given(2500), counts);
            prop_assert!(seen.values().all(|count| *count == 1), "no view is shown twice");
        }
    }

    /// An order of a data set without shares and weights is the order of its shards.
    #[test]
    fn one_source_is_read_in_epochs() {
        let order = Order::new(3, vec![10, 4], 1);
        let alone = Epochs::new(3, vec![10, 4], 1);
        assert!((0..40).all(|position| order.place(position, 1) == alone.place(position, 1)));
        assert_eq!(order.n_given(17), [17]);
    }
}
