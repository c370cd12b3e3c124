//! Random numbers as a function of seed, stream and number, the same on all threads and ranks.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Stream of random numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Draw {
    key: u64,
}

impl Draw {
    /// Creates the stream of `purpose` under `seed`.
    pub(crate) fn new(seed: u64, purpose: &str) -> Self {
        Self { key: xxh3_64_with_seed(purpose.as_bytes(), seed) }
    }

    /// Returns the stream with this number within the stream.
    pub(crate) fn stream(self, number: u64) -> Self {
        Self { key: self.bits(number) }
    }

    /// Returns 64 random bits for `number`.
    pub(crate) fn bits(self, number: u64) -> u64 {
        xxh3_64_with_seed(&number.to_le_bytes(), self.key)
    }

    /// Returns a number uniform in `(0, 1]` for `number`, whose logarithm is finite.
    pub(crate) fn uniform(self, number: u64) -> f64 {
        ((self.bits(number) >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}
