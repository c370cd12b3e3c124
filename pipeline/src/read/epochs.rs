//! The endless stream of one source.
//!
//! Epoch `e` is positions `[e·n, (e+1)·n)`. Within an epoch the shards are permuted, taken in
//! windows of `window_shards`, and the samples of a window are permuted together: reads stay within
//! a few shards while neighbors come from all of them.
//!
//! With weights ([`super::weights`]), a shard has as many positions in an epoch as draws fall on
//! its samples, so that windows and permutations are the same as without weights.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::permutation::{bounded, permute};
use super::place::{Lookahead, Place};
use super::weights::Weights;
use crate::hash::mix;

/// The stream of one source.
#[derive(Debug)]
pub(super) struct Epochs {
    seed: u64,
    window_shards: usize,
    shard_sizes: Vec<u64>,
    n_samples: u64,
    weights: Option<Weights>,
    epoch: Mutex<Option<Arc<EpochOrder>>>,
}

#[derive(Debug)]
struct EpochOrder {
    epoch: u64,
    windows: Vec<Window>,
    /// Offset of the draws of weighted samples.
    offset: u64,
}

/// Samples that are permuted together: positions `range` of the epoch, from `shards`.
#[derive(Debug)]
struct Window {
    range: Range<u64>,
    /// Pairs of (shard, number of samples before it in the window).
    shards: Vec<(usize, u64)>,
    key: u64,
}

impl Epochs {
    /// Creates the stream of shards with `shard_sizes` samples each. A `window_shards` of zero
    /// counts as one.
    pub(super) fn new(seed: u64, shard_sizes: Vec<u64>, window_shards: usize) -> Self {
        let n_samples = shard_sizes.iter().sum();
        let window_shards = window_shards.max(1);
        Self { seed, window_shards, shard_sizes, n_samples, weights: None, epoch: Mutex::new(None) }
    }

    /// Returns the stream in which samples are shown by `weights`, one for each sample: as many in
    /// an epoch as there are samples.
    pub(super) fn with_weights(self, weights: &[f64]) -> Self {
        let weights = Weights::new(weights, &self.shard_sizes);
        Self { weights: Some(weights), ..self }
    }

    /// Returns the sample at `position`, or its `attempt`-th substitute.
    ///
    /// # Panics
    /// Panics if there is no sample.
    pub(super) fn place(&self, position: u64, attempt: u64) -> Place {
        assert!(self.n_samples > 0, "an order needs at least one sample");
        let epoch = position / self.n_samples;
        let within = (position % self.n_samples + attempt) % self.n_samples;
        let order = self.epoch(epoch);
        let index = order.windows.partition_point(|window| window.range.end <= within);
        let window = &order.windows[index];
        let len = window.range.end - window.range.start;
        let permuted = permute(within - window.range.start, len, window.key);
        let slot = window.shards.partition_point(|(_, before)| *before <= permuted) - 1;
        let (shard, before) = window.shards[slot];
        let index_in_shard = permuted - before;
        match &self.weights {
            None => Place { epoch, shard, sample: index_in_shard, repeat: 0 },
            Some(weights) => {
                let (sample, repeat) = weights.sample(shard, index_in_shard, order.offset);
                Place { epoch, shard, sample, repeat }
            }
        }
    }

    /// Returns the shards of the window that contains `position`, and of the window after it.
    pub(super) fn ahead(&self, position: u64) -> Lookahead {
        let epoch = position / self.n_samples;
        let within = position % self.n_samples;
        let order = self.epoch(epoch);
        let index = order.windows.partition_point(|window| window.range.end <= within);
        let end = epoch * self.n_samples + order.windows[index].range.end;
        let mut windows = vec![&order.windows[index]];
        // The last window of an epoch is followed by the first of the next.
        let following;
        match order.windows.get(index + 1) {
            Some(next) => windows.push(next),
            None => {
                following = self.build_epoch(epoch + 1);
                windows.extend(following.windows.first());
            }
        }
        let shards = windows.iter().flat_map(|window| window.shards.iter().map(|(shard, _)| *shard));
        Lookahead { end, shards: shards.collect() }
    }

    fn epoch(&self, epoch: u64) -> Arc<EpochOrder> {
        // A poisoned lock only means that another thread panicked between two plain assignments.
        let mut cached = self.epoch.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match cached.as_ref() {
            Some(order) if order.epoch == epoch => Arc::clone(order),
            _ => {
                let order = Arc::new(self.build_epoch(epoch));
                *cached = Some(Arc::clone(&order));
                order
            }
        }
    }

    fn build_epoch(&self, epoch: u64) -> EpochOrder {
        let key = mix(self.seed ^ mix(epoch.wrapping_add(0x6f63_656c_6c69)));
        // A separate stream: the offset must not depend on how shards are permuted.
        let offset =
            self.weights.as_ref().map_or(0, |weights| bounded(mix(key ^ 0x7765_6967_6874), weights.total()));
        let mut shards: Vec<usize> =
            (0..self.shard_sizes.len()).filter(|shard| self.n_draws(*shard, offset) > 0).collect();
        for i in (1..shards.len()).rev() {
            let j = bounded(mix(key ^ mix(i as u64)), i as u64 + 1) as usize;
            shards.swap(i, j);
        }
        let mut start = 0;
        let mut windows = Vec::with_capacity(shards.len().div_ceil(self.window_shards));
        for (index, chunk) in shards.chunks(self.window_shards).enumerate() {
            let mut n_samples = 0;
            let mut window_shards = Vec::with_capacity(chunk.len());
            for shard in chunk {
                window_shards.push((*shard, n_samples));
                n_samples += self.n_draws(*shard, offset);
            }
            let range = start..start + n_samples;
            start = range.end;
            windows.push(Window {
                range,
                shards: window_shards,
                key: mix(key.wrapping_add(index as u64 + 1)),
            });
        }
        EpochOrder { epoch, windows, offset }
    }

    /// Returns the number of samples that are drawn from `shard` in an epoch with this offset.
    fn n_draws(&self, shard: usize, offset: u64) -> u64 {
        match &self.weights {
            Some(weights) => weights.n_draws(shard, offset),
            None => self.shard_sizes[shard],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        /// Fetching the shards ahead provides every shard before it is read.
        #[test]
        fn shards_are_announced_before_they_are_read(sizes in proptest::collection::vec(0u64..9, 1..9),
            window in 1usize..5, seed: u64) {
            prop_assume!(sizes.iter().sum::<u64>() > 0);
            let order = Epochs::new(seed, sizes, window);
            let mut ahead = order.ahead(0);
            let mut known: Vec<usize> = Vec::new();
            for position in 0..3 * order.n_samples {
                if position >= ahead.end {
                    known = ahead.shards;
                    ahead = order.ahead(position);
                }
                let shard = order.place(position, 0).shard;
                prop_assert!(ahead.shards.contains(&shard));
                prop_assert!(known.is_empty() || known.contains(&shard), "it was not seen coming");
                prop_assert!(ahead.shards.len() <= 2 * window && ahead.end > position);
            }
        }

        #[test]
        fn every_epoch_visits_every_sample_once(
            sizes in proptest::collection::vec(0u64..40, 1..12),
            window in 1usize..5,
            seed: u64,
        ) {
            prop_assume!(sizes.iter().sum::<u64>() > 0);
            let order = Epochs::new(seed, sizes.clone(), window);
            let n = order.n_samples;
            for epoch in 0..3 {
                let seen: HashSet<_> = (0..n)
                    .map(|p| order.place(epoch * n + p, 0))
                    .inspect(|place| assert!(place.sample < sizes[place.shard] && place.epoch == epoch))
                    .collect();
                prop_assert_eq!(seen.len() as u64, n);
            }
        }

        #[test]
        fn places_do_not_depend_on_the_first_position(seed: u64, position in 0u64..10_000) {
            let sizes = vec![13, 7, 29, 1];
            let from_start = Epochs::new(seed, sizes.clone(), 2);
            for p in 0..position.min(500) { from_start.place(p, 0); }
            let direct = Epochs::new(seed, sizes, 2);
            prop_assert_eq!(from_start.place(position, 0), direct.place(position, 0));
        }
    }

    fn epoch_places(seed: u64, epoch: u64) -> Vec<Place> {
        let order = Epochs::new(seed, vec![50, 50], 2);
        (0..100).map(|p| Place { epoch: 0, ..order.place(epoch * 100 + p, 0) }).collect()
    }

    #[test]
    fn epochs_and_seeds_differ() {
        assert_ne!(epoch_places(1, 0), epoch_places(1, 1));
        assert_ne!(epoch_places(1, 0), epoch_places(2, 0));
    }

    /// Each of the 24 orders of four samples is about equally frequent: chi-square with 23 degrees
    /// of freedom stays under its 99.9 % point.
    #[test]
    fn small_windows_are_permuted_evenly() {
        let mut counts = std::collections::HashMap::new();
        let order = Epochs::new(7, vec![4], 1);
        let n_epochs = 4800;
        for epoch in 0..n_epochs {
            let key: Vec<u64> = (0..4).map(|p| order.place(epoch * 4 + p, 0).sample).collect();
            *counts.entry(key).or_insert(0.0) += 1.0;
        }
        let expected = n_epochs as f64 / 24.0;
        assert_eq!(counts.len(), 24);
        let chi_square: f64 = counts.values().map(|c: &f64| (c - expected).powi(2) / expected).sum();
        assert!(chi_square < 49.7, "chi-square {chi_square}");
    }

    #[test]
    fn substitutes_follow_in_the_permutation_of_the_epoch() {
        let order = Epochs::new(3, vec![10], 1);
        assert_eq!(order.place(4, 1), order.place(5, 0));
        assert_eq!(order.place(9, 1), Place { epoch: 0, ..order.place(0, 0) });
    }
}
