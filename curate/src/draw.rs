//! Random numbers as a function of seed, stream and index, the same on all threads and ranks.

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

    /// Returns the stream with this index within the stream.
    pub(crate) fn stream(self, index: u64) -> Self {
        Self { key: self.bits(index) }
    }

    /// Returns 64 random bits for `index`.
    pub(crate) fn bits(self, index: u64) -> u64 {
        xxh3_64_with_seed(&index.to_le_bytes(), self.key)
    }

    /// Returns a number uniform in `(0, 1]` for `index`, whose logarithm is finite.
    pub(crate) fn uniform(self, index: u64) -> f64 {
        ((self.bits(index) >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}
