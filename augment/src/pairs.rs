//! Weighted sums of bytes in exact integer arithmetic, with two taps per instruction.
//!
//! ```text
//! s = Σ_t v_t · w_t        bytes v, weights w = 2^15 h + l with l in -2^14..2^14
//!   = Σ_t v_t · l_t  +  2^15 Σ_t v_t · h_t
//! ```
//!
//! A weight has 23 bits. A 32-bit multiplication of it would handle one tap at a time, at twice the
//! cost. Its halves have 16 bits, and `pmaddwd` multiplies two pairs of such numbers and adds the
//! products. Sums of halves may wrap: the total is correct modulo 2^32, and it fits into 32 bits.
//!
//! This loop takes half of a loader's time. It names vector instructions because compilers do not
//! find them.

/// Number of sums that one block of bytes contributes to.
pub(crate) const LANES: usize = 16;

/// Number of bytes of a block: two for each lane, one per tap.
pub(crate) const BLOCK: usize = 2 * LANES;

/// Weights of two consecutive taps.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Pair {
    /// Lower parts l of both weights, the first one in the lower half.
    low: i32,
    /// Upper parts h of both weights, likewise.
    high: i32,
}

impl Pair {
    /// Splits two weights, each below 2^30.
    pub(crate) fn new(weights: [i32; 2]) -> Self {
        let low = weights.map(|w| (w << 17) >> 17);
        let high = [weights[0] - low[0], weights[1] - low[1]].map(|rest| rest >> 15);
        Self { low: pack(low), high: pack(high) }
    }

    /// Returns the two weights.
    #[inline(always)]
    pub(crate) fn weights(self) -> [i32; 2] {
        let first_low = (self.low << 16) >> 16;
        let first_high = (self.high << 16) >> 16;
        [first_low + (first_high << 15), (self.low >> 16) + ((self.high >> 16) << 15)]
    }
}

/// Packs two 16-bit numbers, the first one into the lower half.
fn pack([first, second]: [i32; 2]) -> i32 {
    (first & 0xffff) | (second << 16)
}

/// Returns the weighted sums of N adjacent blocks over the pairs; those of the next pair are
/// `stride` bytes further.
#[inline(always)]
pub(crate) fn sums<const N: usize>(bytes: &[u8], stride: usize, pairs: &[Pair]) -> [[i32; LANES]; N] {
    let mut sums = [[0i32; LANES]; N];
    for (blocks, pair) in blocks::<N>(bytes, stride).zip(pairs) {
        let [first, second] = pair.weights();
        for (sums, block) in sums.iter_mut().zip(blocks) {
            for (sum, values) in sums.iter_mut().zip(block.as_chunks::<2>().0) {
                let products = i32::from(values[0]) * first + i32::from(values[1]) * second;
                *sum = sum.wrapping_add(products);
            }
        }
    }
    sums
}

/// Returns the N blocks of each pair.
#[inline(always)]
fn blocks<const N: usize>(bytes: &[u8], stride: usize) -> impl Iterator<Item = &[[u8; BLOCK]; N]> {
    bytes.chunks(stride).map_while(|bytes| bytes.as_chunks::<BLOCK>().0.first_chunk::<N>())
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod x86 {
    //! Vector code for [`super::sums`].

    use std::arch::x86_64::*;

    use super::{BLOCK, LANES, Pair, blocks};

    /// Computes [`super::sums`] in vectors of 256 bits.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(crate) fn sums_avx2<const N: usize>(
        bytes: &[u8],
        stride: usize,
        pairs: &[Pair],
    ) -> [[i32; LANES]; N] {
        let zero = _mm256_setzero_si256();
        let mut low = [[zero; 2]; N];
        let mut high = [[zero; 2]; N];
        for (blocks, pair) in blocks::<N>(bytes, stride).zip(pairs) {
            let low_weights = _mm256_set1_epi32(pair.low);
            let high_weights = _mm256_set1_epi32(pair.high);
            for (n, block) in blocks.iter().enumerate() {
                let halves = bytemuck::cast::<[u8; BLOCK], [__m128i; 2]>(*block);
                for (half, bytes) in halves.into_iter().enumerate() {
                    let values = _mm256_cvtepu8_epi16(bytes);
                    low[n][half] = _mm256_add_epi32(low[n][half], _mm256_madd_epi16(values, low_weights));
                    high[n][half] = _mm256_add_epi32(high[n][half], _mm256_madd_epi16(values, high_weights));
                }
            }
        }
        let mut sums = [[0; LANES]; N];
        for n in 0..N {
            let first = _mm256_add_epi32(low[n][0], _mm256_slli_epi32::<15>(high[n][0]));
            let second = _mm256_add_epi32(low[n][1], _mm256_slli_epi32::<15>(high[n][1]));
            sums[n] = bytemuck::cast([first, second]);
        }
        sums
    }

    /// Computes [`super::sums`] in vectors of 512 bits.
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    pub(crate) fn sums_avx512<const N: usize>(
        bytes: &[u8],
        stride: usize,
        pairs: &[Pair],
    ) -> [[i32; LANES]; N] {
        let zero = _mm512_setzero_si512();
        let mut low = [zero; N];
        let mut high = [zero; N];
        for (blocks, pair) in blocks::<N>(bytes, stride).zip(pairs) {
            let low_weights = _mm512_set1_epi32(pair.low);
            let high_weights = _mm512_set1_epi32(pair.high);
            for (n, block) in blocks.iter().enumerate() {
                let values = _mm512_cvtepu8_epi16(bytemuck::cast::<[u8; BLOCK], __m256i>(*block));
                low[n] = _mm512_add_epi32(low[n], _mm512_madd_epi16(values, low_weights));
                high[n] = _mm512_add_epi32(high[n], _mm512_madd_epi16(values, high_weights));
            }
        }
        let mut sums = [[0; LANES]; N];
        for n in 0..N {
            sums[n] = bytemuck::cast(_mm512_add_epi32(low[n], _mm512_slli_epi32::<15>(high[n])));
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use multiversion::{multiversion, target::match_target};
    use proptest::prelude::*;

    use super::*;

    const N: usize = 3;

    /// Computes the sums in the widest vectors of this machine.
    #[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
    fn sums_widest(bytes: &[u8], stride: usize, pairs: &[Pair]) -> [[i32; LANES]; N] {
        match_target! {
            "x86_64+avx512bw" => x86::sums_avx512(bytes, stride, pairs),
            "x86_64+avx2" => x86::sums_avx2(bytes, stride, pairs),
            _ => sums(bytes, stride, pairs),
        }
    }

    /// Computes the sums in vectors of at most 256 bits.
    #[multiversion(targets("x86_64+avx2"))]
    fn sums_256(bytes: &[u8], stride: usize, pairs: &[Pair]) -> [[i32; LANES]; N] {
        match_target! {
            "x86_64+avx2" => x86::sums_avx2(bytes, stride, pairs),
            _ => sums(bytes, stride, pairs),
        }
    }

    /// Compares the sums of all implementations with those in 64 bits. Blocks of consecutive pairs
    /// are separated by `padding` bytes.
    fn check(weights: &[[i32; 2]], padding: usize, byte: impl Fn(usize) -> u8) {
        let stride = N * BLOCK + padding;
        let bytes: Vec<u8> = (0..stride * weights.len()).map(byte).collect();
        let pairs: Vec<Pair> = weights.iter().map(|weights| Pair::new(*weights)).collect();
        let results = [sums, sums_widest, sums_256].map(|sums| sums(&bytes, stride, &pairs));
        for block in 0..N {
            for lane in 0..LANES {
                let mut total = 0;
                for (pair, weights) in weights.iter().enumerate() {
                    for (tap, weight) in weights.iter().enumerate() {
                        let value = bytes[pair * stride + block * BLOCK + 2 * lane + tap];
                        total += i64::from(*weight) * i64::from(value);
                    }
                }
                assert_eq!(results.map(|sums| i64::from(sums[block][lane])), [total; 3], "{weights:?}");
            }
        }
    }

    proptest! {
        /// Sums are exact if the total fits into 32 bits, up to a weight of 1.25 in 22-bit fixed
        /// point.
        #[test]
        fn sums_are_exact(weights in prop::collection::vec(prop::array::uniform2(-600_000i32..600_000), 0..9),
                          one in 0i32..5_242_880, padding in 0usize..40, seed: u32) {
            let mut weights = weights;
            weights.push([one, -one / 4]);
            prop_assert!(weights.iter().all(|weights| Pair::new(*weights).weights() == *weights));
            check(&weights, padding, |i| ((i as u32 ^ seed).wrapping_mul(2_654_435_761) >> 24) as u8);
        }
    }

    #[test]
    fn totals_are_exact_when_sums_of_halves_wrap() {
        let weights: Vec<[i32; 2]> =
            (0..200).map(|i| [(1 << 21) + 16_383 - i, -(1 << 21) + 16_383]).collect();
        check(&weights, 0, |_| 255);
    }
}
