//! Order in which samples are packed.

use augment::ViewRng;

/// Shuffles `entries` by `seed`.
pub(crate) fn shuffle<T>(entries: &mut [T], seed: u64) {
    /// Distinguishes this random stream from all others.
    const DOMAIN: u64 = 0x7061_636b_0000_0000;
    ViewRng::from_words([seed, DOMAIN, 0, 0]).shuffle(entries);
}
