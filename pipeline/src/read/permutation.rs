//! Pseudo-random permutations of ranges, whose elements are computed one by one.

use crate::hash::mix;

/// Number of rounds of the Feistel network that permutes a window. Four already yield a
/// pseudo-random permutation when the round function is random (Luby and Rackoff 1988); two more
/// are for a round function that is merely a good mixer.
const FEISTEL_ROUNDS: u64 = 6;

/// Permutes `0..n` under `key`: a Feistel network on the next even number of bits, repeated until
/// the value falls inside the range (cycle walking).
pub(super) fn permute(index: u64, n: u64, key: u64) -> u64 {
    if n <= 1 {
        return 0;
    }
    let half_bits = (64 - (n - 1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1u64 << half_bits) - 1;
    let mut value = index;
    loop {
        let mut left = value >> half_bits;
        let mut right = value & mask;
        for round in 0..FEISTEL_ROUNDS {
            let f = mix(key ^ mix(right.wrapping_add(round << 56))) & mask;
            (left, right) = (right, left ^ f);
        }
        value = (left << half_bits) | right;
        if value < n {
            return value;
        }
    }
}

/// Maps 64 random bits to a uniform number in `0..n`, by the high half of a product.
pub(super) fn bounded(random: u64, n: u64) -> u64 {
    ((u128::from(random) * u128::from(n)) >> 64) as u64
}
