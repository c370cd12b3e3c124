//! Weighted sums of bytes in exact integer arithmetic, two taps per instruction.
//!
//! ```text
//! s = Σ_t v_t · w_t        bytes v, weights w = 2^15 h + l with l in -2^14..2^14
//!   = Σ_t v_t · l_t  +  2^15 Σ_t v_t · h_t
//! ```
//!
//! A weight has 23 bits, for which a 32-bit multiplication handles one tap at a time, at twice the
//! cost. Its halves have 16 bits, of which `pmaddwd` multiplies two pairs and adds the products.
//! Sums of halves may wrap: the total is correct modulo 2^32, and it fits into 32 bits.

/// Number of sums that one block of bytes contributes to.
pub(crate) const LANES: usize = 16;

/// Number of bytes of a block: two for each lane, one for each tap.
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
    pub(crate) fn of(weights: [i32; 2]) -> Self {
        let low = weights.map(|w| (w << 17) >> 17);
        let high = [weights[0] - low[0], weights[1] - low[1]].map(|rest| rest >> 15);
        let halves = |[first, second]: [i32; 2]| (first & 0xffff) | (second << 16);
        Self { low: halves(low), high: halves(high) }
    }

    /// Returns the two weights.
    #[inline(always)]
    pub(crate) fn weights(self) -> [i32; 2] {
        let first = |halves: i32| (halves << 16) >> 16;
        [first(self.low) + (first(self.high) << 15), (self.low >> 16) + ((self.high >> 16) << 15)]
    }
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
            let of_low = _mm256_set1_epi32(pair.low);
            let of_high = _mm256_set1_epi32(pair.high);
            for (n, block) in blocks.iter().enumerate() {
                for (half, bytes) in
                    bytemuck::cast::<[u8; BLOCK], [__m128i; 2]>(*block).into_iter().enumerate()
                {
                    let values = _mm256_cvtepu8_epi16(bytes);
                    low[n][half] = _mm256_add_epi32(low[n][half], _mm256_madd_epi16(values, of_low));
                    high[n][half] = _mm256_add_epi32(high[n][half], _mm256_madd_epi16(values, of_high));
                }
            }
        }
        let mut sums = [[0; LANES]; N];
        for n in 0..N {
            let total = |half: usize| _mm256_add_epi32(low[n][half], _mm256_slli_epi32::<15>(high[n][half]));
            sums[n] = bytemuck::cast([total(0), total(1)]);
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
            let of_low = _mm512_set1_epi32(pair.low);
            let of_high = _mm512_set1_epi32(pair.high);
            for (n, block) in blocks.iter().enumerate() {
                let values = _mm512_cvtepu8_epi16(bytemuck::cast::<[u8; BLOCK], __m256i>(*block));
                low[n] = _mm512_add_epi32(low[n], _mm512_madd_epi16(values, of_low));
                high[n] = _mm512_add_epi32(high[n], _mm512_madd_epi16(values, of_high));
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
    fn widest(bytes: &[u8], stride: usize, pairs: &[Pair]) -> [[i32; LANES]; N] {
        match_target! {
            "x86_64+avx512bw" => x86::sums_avx512(bytes, stride, pairs),
            "x86_64+avx2" => x86::sums_avx2(bytes, stride, pairs),
            _ => sums(bytes, stride, pairs),
        }
    }

    #[multiversion(targets("x86_64+avx2"))]
    fn narrower(bytes: &[u8], stride: usize, pairs: &[Pair]) -> [[i32; LANES]; N] {
        match_target! {
            "x86_64+avx2" => x86::sums_avx2(bytes, stride, pairs),
            _ => sums(bytes, stride, pairs),
        }
    }

    fn check(weights: &[[i32; 2]], beyond: usize, byte: impl Fn(usize) -> u8) {
        let stride = N * BLOCK + beyond;
        let bytes: Vec<u8> = (0..stride * weights.len()).map(byte).collect();
        let pairs: Vec<Pair> = weights.iter().map(|weights| Pair::of(*weights)).collect();
        let all = [sums, widest, narrower].map(|sums| sums(&bytes, stride, &pairs));
        for (block, lane) in (0..N).flat_map(|block| (0..LANES).map(move |lane| (block, lane))) {
            let value = |pair: usize, tap: usize| bytes[pair * stride + block * BLOCK + 2 * lane + tap];
            let total: i64 = weights
                .iter()
                .enumerate()
                .map(|(pair, weights)| -> i64 {
                    (0..2).map(|tap| i64::from(weights[tap]) * i64::from(value(pair, tap))).sum()
                })
                .sum();
            assert_eq!(all.map(|sums| i64::from(sums[block][lane])), [total; 3], "{weights:?}");
        }
    }

    proptest! {
        /// Sums are exact if the total fits into 32 bits, up to a weight of 1.25 in 22-bit fixed
        /// point.
        #[test]
        fn sums_are_exact(weights in prop::collection::vec(prop::array::uniform2(-600_000i32..600_000), 0..9),
                          one in 0i32..5_242_880, beyond in 0usize..40, seed: u32) {
            let mut weights = weights;
            weights.push([one, -one / 4]);
            prop_assert!(weights.iter().all(|weights| Pair::of(*weights).weights() == *weights));
            check(&weights, beyond, |i| ((i as u32 ^ seed).wrapping_mul(2_654_435_761) >> 24) as u8);
        }
    }

    #[test]
    fn sums_of_halves_may_wrap() {
        let weights: Vec<[i32; 2]> =
            (0..200).map(|i| [(1 << 21) + 16_383 - i, -(1 << 21) + 16_383]).collect();
        check(&weights, 0, |_| 255);
    }
}
