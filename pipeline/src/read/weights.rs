//! Samples by weight: how often each is drawn in an epoch.
//!
//! ```text
//! draw j of n, in 0..n: the sample whose interval contains (j + u) · W / n
//! intervals of length w_i, one after the other, W = Σ w_i
//! ```
//!
//! This is systematic sampling: with u in [0, 1), a function of the epoch, sample i is drawn n ·
//! w_i / W times in an epoch, rounded up or down, and exactly so often on average. Weights are
//! integers, so that draws are the same on every machine.

/// Value of the largest weight.
const LARGEST: f64 = (1u64 << 32) as f64;

/// Weights of the samples of a source.
#[derive(Debug)]
pub(super) struct Weights {
    /// Sum of the weights before each sample, and of all.
    sums: Vec<u64>,
    /// Number of samples before each shard, and of all.
    starts: Vec<u64>,
}

impl Weights {
    /// Creates the weights of the samples of shards with `shard_sizes`. They are finite and not
    /// negative, and one is positive.
    pub(super) fn new(weights: &[f64], shard_sizes: &[u64]) -> Self {
        let largest = weights.iter().copied().fold(0.0, f64::max);
        let mut sums = vec![0];
        let mut starts = vec![0];
        for weight in weights {
            sums.push(sums[sums.len() - 1] + to_integer(*weight, largest));
        }
        for size in shard_sizes {
            starts.push(starts[starts.len() - 1] + size);
        }
        Self { sums, starts }
    }

    /// Returns the sum of all weights, W.
    pub(super) fn total(&self) -> u64 {
        self.sums[self.sums.len() - 1]
    }

    /// Returns the number of draws of the samples of `shard` in an epoch with this offset, u · W.
    pub(super) fn n_draws(&self, shard: usize, offset: u64) -> u64 {
        self.first_draw(self.starts[shard + 1], offset) - self.first_draw(self.starts[shard], offset)
    }

    /// Returns the sample, by its index in its shard, of draw `index` among those of `shard`, and
    /// the number of earlier draws of the same sample.
    pub(super) fn sample(&self, shard: usize, index: u64, offset: u64) -> (u64, u64) {
        let draw = self.first_draw(self.starts[shard], offset) + index;
        let n = self.n();
        let point = (u128::from(draw) * u128::from(self.total()) + u128::from(offset)) / u128::from(n);
        let sample = self.sums.partition_point(|sum| u128::from(*sum) <= point) as u64 - 1;
        (sample - self.starts[shard], draw - self.first_draw(sample, offset))
    }

    /// Returns the number of samples, n, which is also the number of draws of an epoch.
    fn n(&self) -> u64 {
        self.sums.len() as u64 - 1
    }

    /// Returns the first draw of `sample` or of one after it: the least j with (j · W + offset) / n
    /// >= the sum before it.
    fn first_draw(&self, sample: u64, offset: u64) -> u64 {
        let sum = u128::from(self.sums[sample as usize]) * u128::from(self.n());
        sum.saturating_sub(u128::from(offset)).div_ceil(u128::from(self.total())) as u64
    }
}

/// Scales `weight` so that `largest` becomes [`LARGEST`]. A positive weight is at least 1.
fn to_integer(weight: f64, largest: f64) -> u64 {
    if weight > 0.0 { ((weight / largest * LARGEST).round() as u64).max(1) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// All draws of an epoch, shard by shard, are of samples of the shard; each sample is drawn
        /// as often as its weight says, rounded.
        #[test]
        fn samples_are_drawn_by_weight(
            sizes in proptest::collection::vec(0u64..9, 1..6),
            seed in 0u64..1000,
            share in 0.0f64..1.0,
        ) {
            let n: u64 = sizes.iter().sum();
            prop_assume!(n > 0);
            let raw: Vec<f64> = (0..n).map(|i| ((i + 1) * (seed + 7) % 11) as f64).collect();
            prop_assume!(raw.iter().any(|weight| *weight > 0.0));
            let weights = Weights::new(&raw, &sizes);
            let offset = (share * weights.total() as f64) as u64;
            let mut counts = vec![0u64; n as usize];
            let mut start = 0;
            for (shard, size) in sizes.iter().enumerate() {
                for index in 0..weights.n_draws(shard, offset) {
                    let (sample, repeat) = weights.sample(shard, index, offset);
                    prop_assert!(sample < *size);
                    prop_assert_eq!(repeat, counts[(start + sample) as usize]);
                    counts[(start + sample) as usize] += 1;
                }
                start += size;
            }
            prop_assert_eq!(counts.iter().sum::<u64>(), n);
            let total: f64 = raw.iter().sum();
            for (count, weight) in counts.iter().zip(&raw) {
                let expected = n as f64 * weight / total;
                prop_assert!((*count as f64 - expected).abs() < 1.0 + 1e-6, "{} {}", count, expected);
            }
        }
    }

    /// Over offsets that cover the interval, a sample is drawn exactly in proportion to its weight.
    #[test]
    fn draws_are_exact_on_average() {
        let weights = Weights::new(&[0.3, 1.0, 0.0, 0.45], &[4]);
        let mut counts = [0u64; 4];
        let n_epochs = 3500;
        for epoch in 0..n_epochs {
            let offset = (u128::from(weights.total()) * epoch / n_epochs) as u64;
            for draw in 0..4 {
                counts[weights.sample(0, draw, offset).0 as usize] += 1;
            }
        }
        for (count, weight) in counts.iter().zip([0.3, 1.0, 0.0, 0.45]) {
            let expected = 4.0 * n_epochs as f64 * weight / 1.75;
            assert!((*count as f64 - expected).abs() <= 4.0, "{count} {expected}");
        }
    }
}
