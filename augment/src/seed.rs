//! Counter-based random number generator. Every random choice of the data path has an address and
//! is not drawn in sequence: (run seed, epoch, sample, attempt, view, operation) identifies a
//! ChaCha8 stream, whose values do not depend on threads, ranks or restarts.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Address of a sample's random choices within a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SampleKey {
    /// Seed of the run.
    pub seed: u64,
    /// Index of the pass over the data.
    pub epoch: u64,
    /// Index of the sample in the data set.
    pub sample: u64,
    /// Zero, or the index of the substitute: a sample that replaces a bad one has other views than
    /// at its own position, so that no batch contains a view twice.
    pub attempt: u64,
}

/// An operation that draws random numbers. Each has a separate stream, so that adding a draw to
/// one does not change the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Operation {
    /// Random-resized crop.
    Crop = 1,
    /// Horizontal flip.
    Flip = 2,
    /// Brightness, contrast, saturation, hue and their order.
    Jitter = 3,
    /// Grayscale.
    Gray = 4,
    /// Gaussian blur.
    Blur = 5,
    /// Solarize.
    Solarize = 6,
    /// Rotation by quarters of a turn.
    Rotate = 7,
    /// Choice of the channels that are dropped.
    ChannelDrop = 8,
    /// Random erasing.
    Erase = 9,
}

/// Stream of random numbers of one operation on one view.
#[derive(Debug, Clone)]
pub struct ViewRng(ChaCha8Rng);

impl ViewRng {
    /// Creates the stream of `operation` on view `view` of the sample `key`.
    pub fn new(key: SampleKey, view: u32, operation: Operation) -> Self {
        let address = (u64::from(view) << 32) | u64::from(operation as u32);
        // Attempts count samples of an epoch and epochs count passes: neither reaches 2^32.
        let pass = (key.epoch << 32) ^ key.attempt;
        Self::from_words([key.seed, pass, key.sample, address])
    }

    /// Creates the stream with this 256-bit address.
    pub fn from_words(words: [u64; 4]) -> Self {
        let mut seed = [0; 32];
        for (bytes, word) in seed.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        Self(ChaCha8Rng::from_seed(seed))
    }

    /// Draws a uniform number in `[0, 1)`, with 24 bits.
    pub fn uniform(&mut self) -> f32 {
        (self.0.next_u32() >> 8) as f32 * (1.0 / (1 << 24) as f32)
    }

    /// Draws a uniform number in `[low, high)`, computed in f64.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        let unit = (self.0.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64);
        low + (high - low) * unit
    }

    /// Draws a uniform integer in `0..n`; `n` is at least one.
    pub fn below(&mut self, n: u32) -> u32 {
        ((u64::from(self.0.next_u32()) * u64::from(n)) >> 32) as u32
    }

    /// Returns `true` with probability `p`.
    pub fn chance(&mut self, p: f32) -> bool {
        self.uniform() < p
    }

    /// Draws a standard normal number, by Box and Muller.
    pub fn normal(&mut self) -> f32 {
        // 1 - u lies in (0, 1], where the logarithm is finite.
        let radius = (-2.0 * (1.0 - f64::from(self.uniform())).ln()).sqrt();
        let angle = std::f64::consts::TAU * f64::from(self.uniform());
        (radius * angle.cos()) as f32
    }

    /// Draws a random order of the four jitter operations.
    pub fn permutation4(&mut self) -> [u8; 4] {
        let mut order = [0, 1, 2, 3];
        self.shuffle(&mut order);
        order
    }

    /// Puts fewer than 2^32 `items` into a random order (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u32 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: SampleKey = SampleKey { seed: 1, epoch: 2, sample: 3, attempt: 0 };

    fn draw(key: SampleKey, view: u32, operation: Operation) -> f64 {
        ViewRng::new(key, view, operation).between(0.0, 1.0)
    }

    #[test]
    fn each_part_of_the_address_changes_the_stream() {
        let base = draw(KEY, 0, Operation::Crop);
        assert_eq!(base, draw(KEY, 0, Operation::Crop));
        let others = [
            draw(SampleKey { seed: 9, ..KEY }, 0, Operation::Crop),
            draw(SampleKey { epoch: 9, ..KEY }, 0, Operation::Crop),
            draw(SampleKey { sample: 9, ..KEY }, 0, Operation::Crop),
            draw(SampleKey { attempt: 9, ..KEY }, 0, Operation::Crop),
            draw(KEY, 1, Operation::Crop),
            draw(KEY, 0, Operation::Flip),
        ];
        assert!(others.iter().all(|other| *other != base));
    }

    /// A change of these numbers changes every crop of every run.
    #[test]
    fn the_stream_is_pinned() {
        let mut rng = ViewRng::new(KEY, 5, Operation::Jitter);
        let draws: [u32; 3] = std::array::from_fn(|_| rng.below(1 << 20));
        let mut same_address = ViewRng::from_words([1, 2 << 32, 3, (5 << 32) | 3]);
        assert_eq!(draws, std::array::from_fn(|_| same_address.below(1 << 20)));
        assert_eq!(draws, PINNED);
    }

    const PINNED: [u32; 3] = [297_752, 88_069, 903_769];

    #[test]
    fn draws_have_the_right_moments() {
        let mut rng = ViewRng::new(KEY, 0, Operation::Crop);
        let n = 40_000;
        let normals: Vec<f64> = (0..n).map(|_| f64::from(rng.normal())).collect();
        let mean = normals.iter().sum::<f64>() / f64::from(n);
        let variance = normals.iter().map(|x| x * x).sum::<f64>() / f64::from(n);
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
        let hits = (0..n).filter(|_| rng.chance(0.3)).count() as f64 / f64::from(n);
        assert!((hits - 0.3).abs() < 0.01, "{hits}");
    }

    #[test]
    fn permutations_are_uniform() {
        let mut counts = std::collections::HashMap::new();
        let mut rng = ViewRng::new(KEY, 0, Operation::Jitter);
        for _ in 0..24_000 {
            *counts.entry(rng.permutation4()).or_insert(0.0f64) += 1.0;
        }
        let chi_square: f64 = counts.values().map(|c| (c - 1000.0).powi(2) / 1000.0).sum();
        assert!(counts.len() == 24 && chi_square < 49.7, "chi-square {chi_square}");
    }
}
