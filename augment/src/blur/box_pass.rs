//! One pass of a box blur over bytes `step` apart along the box: 1 along rows, the row length along
//! columns.
//!
//! ```text
//! out[i] = (w Σ_{0 < t < T-1} in[i + t·step] + f (in[i] + in[i + (T-1)·step]) + 2^23) >> 24        T taps
//! ```

use multiversion::{multiversion, target::match_target};

use super::box_kernel::BoxKernel;

/// Number of bytes whose sums are kept in registers.
pub(super) const BLOCK: usize = 32;

/// Half a unit of the 24-bit fixed point, which is added to round a sum.
const HALF: u32 = 1 << 23;

/// Runs one pass of `kernel` into `out`, which consists of complete blocks. The first tap of the
/// first byte of `out` is the first byte of `items`.
///
/// # Panics
/// Panics if `items` is shorter than the taps of `out` require.
#[multiversion(targets("x86_64+avx2"))]
pub(super) fn box_pass(items: &[u8], step: usize, kernel: BoxKernel, out: &mut [u8]) {
    // Standard deviations up to 2.4, as in all recipes, have three or five taps, whose loops are
    // unrolled.
    match kernel.n_taps() {
        3 => match_target! {
            "x86_64+avx2" => x86::pass::<3>(items, step, kernel, out),
            _ => pass(items, step, kernel, out),
        },
        5 => match_target! {
            "x86_64+avx2" => x86::pass::<5>(items, step, kernel, out),
            _ => pass(items, step, kernel, out),
        },
        _ => pass(items, step, kernel, out),
    }
}

/// Computes [`box_pass`] for any number of taps.
#[inline(always)]
fn pass(items: &[u8], step: usize, kernel: BoxKernel, out: &mut [u8]) {
    let out = out.as_chunks_mut::<BLOCK>().0;
    let last = kernel.n_taps() - 1;
    let n = out.len();
    for (index, out) in out.iter_mut().enumerate() {
        let mut middle = [0u16; BLOCK];
        let mut ends = [0u16; BLOCK];
        for tap in 1..last {
            add(&mut middle, &blocks(items, tap * step, n)[index]);
        }
        add(&mut ends, &blocks(items, 0, n)[index]);
        add(&mut ends, &blocks(items, last * step, n)[index]);
        for ((out, middle), ends) in out.iter_mut().zip(&middle).zip(&ends) {
            let sum = u32::from(*middle) * kernel.weight + u32::from(*ends) * kernel.end_weight;
            *out = ((sum + HALF) >> 24) as u8;
        }
    }
}

/// Returns the `n` blocks of `items` from byte `start` on.
#[inline(always)]
fn blocks(items: &[u8], start: usize, n: usize) -> &[[u8; BLOCK]] {
    &items[start..].as_chunks::<BLOCK>().0[..n]
}

/// Adds the bytes of a block to their sums.
#[inline(always)]
fn add(sums: &mut [u16; BLOCK], block: &[u8; BLOCK]) {
    for (sum, value) in sums.iter_mut().zip(block) {
        *sum += u16::from(*value);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! [`super::pass`] in vectors of 256 bits. A weight of 24 bits is split into two of 12, because
    //! `pmaddwd` multiplies 16-bit numbers: both sums of a pixel at once. The total is correct
    //! modulo 2^32, and it fits.

    use std::arch::x86_64::*;

    use super::{BLOCK, BoxKernel, HALF, blocks};

    /// Weights of the two sums of a pixel, that of the middle in the lower half of each lane.
    #[derive(Clone, Copy)]
    struct Weights {
        /// Upper twelve bits of each weight.
        high: __m256i,
        /// Lower twelve bits of each weight.
        low: __m256i,
    }

    /// Computes [`super::pass`] for N taps.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(super) fn pass<const N: usize>(items: &[u8], step: usize, kernel: BoxKernel, out: &mut [u8]) {
        let weights = Weights {
            high: _mm256_set1_epi32(packed_weights(kernel, 12)),
            low: _mm256_set1_epi32(packed_weights(kernel, 0)),
        };
        let out = out.as_chunks_mut::<BLOCK>().0;
        let n = out.len();
        let taps: [&[[u8; BLOCK]]; N] = std::array::from_fn(|tap| blocks(items, tap * step, n));
        for (index, out) in out.iter_mut().enumerate() {
            let [mut low, mut high] = sums(taps[1][index], [0; BLOCK]);
            for tap in (2..N - 1).step_by(2) {
                let [low_sums, high_sums] = sums(taps[tap][index], taps[tap + 1][index]);
                low = _mm256_add_epi16(low, low_sums);
                high = _mm256_add_epi16(high, high_sums);
            }
            let [low_ends, high_ends] = sums(taps[0][index], taps[N - 1][index]);
            let words = [pixels(low, low_ends, weights), pixels(high, high_ends, weights)];
            *out = bytemuck::cast(_mm256_packus_epi16(words[0], words[1]));
        }
    }

    /// Returns the twelve bits from `shift` on of both weights, that of the middle in the lower
    /// half.
    fn packed_weights(kernel: BoxKernel, shift: u32) -> i32 {
        let middle = kernel.weight >> shift & 0xfff;
        let end = kernel.end_weight >> shift & 0xfff;
        (middle | end << 16) as i32
    }

    /// Returns 16-bit sums of bytes of `a` and `b`: those of the lower and of the upper eight of
    /// each half.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn sums(a: [u8; BLOCK], b: [u8; BLOCK]) -> [__m256i; 2] {
        let a: __m256i = bytemuck::cast(a);
        let b: __m256i = bytemuck::cast(b);
        let one = _mm256_set1_epi8(1);
        [
            _mm256_maddubs_epi16(_mm256_unpacklo_epi8(a, b), one),
            _mm256_maddubs_epi16(_mm256_unpackhi_epi8(a, b), one),
        ]
    }

    /// Returns the weighted sums of 16 pixels, rounded. Unpacking and packing stay within halves of
    /// 128 bits, so that the pixels keep their order.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn pixels(middle: __m256i, ends: __m256i, weights: Weights) -> __m256i {
        let first = rounded(_mm256_unpacklo_epi16(middle, ends), weights);
        let second = rounded(_mm256_unpackhi_epi16(middle, ends), weights);
        _mm256_packus_epi32(first, second)
    }

    /// Returns weighted sums of eight pixels, rounded, from pairs of their sums of bytes.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn rounded(pairs: __m256i, weights: Weights) -> __m256i {
        let high = _mm256_slli_epi32::<12>(_mm256_madd_epi16(pairs, weights.high));
        let low = _mm256_add_epi32(_mm256_madd_epi16(pairs, weights.low), _mm256_set1_epi32(HALF as i32));
        _mm256_srli_epi32::<24>(_mm256_add_epi32(high, low))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn vector_code_equals_portable_code(radius in 0.05f32..2.4, step in 1usize..40, n in 1usize..4,
            seed: u32) {
            let kernel = BoxKernel::from_gaussian(radius);
            prop_assert!([3, 5].contains(&kernel.n_taps()));
            let mut items = vec![0; kernel.n_taps() * step + n * BLOCK];
            for (i, item) in items.iter_mut().enumerate() {
                let byte = ((i as u32 ^ seed).wrapping_mul(2_654_435_761) >> 24) as u8;
                // The ends of the range are frequent.
                *item = match byte { 0..=40 => 0, 215.. => 255, byte => byte };
            }
            let mut vector = vec![0; n * BLOCK];
            let mut portable = vec![0; n * BLOCK];
            box_pass(&items, step, kernel, &mut vector);
            pass(&items, step, kernel, &mut portable);
            prop_assert_eq!(vector, portable);
        }
    }
}
