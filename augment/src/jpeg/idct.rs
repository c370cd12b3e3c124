//! Dequantization and the inverse cosine transform, in libjpeg's integer arithmetic ("islow").
//!
//! ```text
//! one dimension, inputs x_0 .. x_7, c_k the constants below in 13-bit fixed point (Loeffler, Ligtenberg and Moschytz 1989):
//!   even: e_0, e_1 = (x_0 ± x_4) · 2^13,  e_3 = (c_2 + c_3) x_2 + c_2 x_6,  e_2 = c_2 x_2 + (c_2 - c_7) x_6
//!         t_10, t_13 = e_0 ± e_3,  t_11, t_12 = e_1 ± e_2
//!   odd:  z_3 = (c_5 - c_8)(x_7 + x_3) + c_5 (x_5 + x_1),  z_4 = c_5 (x_7 + x_3) + (c_5 - c_1)(x_5 + x_1)
//!         o_0 = (c_0 - c_4) x_7 - c_4 x_1 + z_3,   o_3 = (c_6 - c_4) x_1 - c_4 x_7 + z_4
//!         o_1 = (c_9 - c_10) x_5 - c_10 x_3 + z_4,  o_2 = (c_11 - c_10) x_3 - c_10 x_5 + z_3
//!   outputs  t_10 ± o_3, t_11 ± o_2, t_12 ± o_1, t_13 ± o_0,  rounded and shifted
//! columns first, shifted by 11 bits; then rows, by 18; then 128 is added and the result clamped to a byte
//! ```
//!
//! Numbers have 16 bits before the products and between the passes, as in libjpeg-turbo's vector
//! code: they wrap before a product and saturate after one. If only the first row of a block is
//! nonzero, the pass over columns is a shift, which wraps. All this matters only for coefficients
//! that no encoder writes.

use multiversion::{multiversion, target::match_target};

use super::coefficients::Block;

/// Constants in 13-bit fixed point, in ascending order.
const C: [i32; 12] = [2446, 3196, 4433, 6270, 7373, 9633, 12299, 15137, 16069, 16819, 20995, 25172];

/// Shift after the columns: the 13 bits of the constants, less 2 that are kept.
const COLUMNS_SHIFT: i32 = 11;

/// Shift after the rows: 13 bits, the 2 that were kept, and 3 for the factor of the transform.
const ROWS_SHIFT: i32 = 18;

/// Pairs of factors of two inputs, named by the sums that they are used in.
mod factors {
    use super::C;

    /// Factors of x_2 and x_6.
    pub(super) const E_3: [i32; 2] = [C[2] + C[3], C[2]];
    pub(super) const E_2: [i32; 2] = [C[2], C[2] - C[7]];
    /// Factors of x_7 + x_3 and x_5 + x_1.
    pub(super) const Z_3: [i32; 2] = [C[5] - C[8], C[5]];
    pub(super) const Z_4: [i32; 2] = [C[5], C[5] - C[1]];
    /// Factors of x_7 and x_1.
    pub(super) const O_0: [i32; 2] = [C[0] - C[4], -C[4]];
    pub(super) const O_3: [i32; 2] = [-C[4], C[6] - C[4]];
    /// Factors of x_5 and x_3.
    pub(super) const O_1: [i32; 2] = [C[9] - C[10], -C[10]];
    pub(super) const O_2: [i32; 2] = [-C[10], C[11] - C[10]];
}

/// Transforms a row of blocks into 8 rows of samples, `stride` bytes apart.
#[multiversion(targets("x86_64+avx2"))]
pub(crate) fn transform_row(blocks: &[Block], quantization: &[u16; 64], samples: &mut [u8], stride: usize) {
    match_target! {
        "x86_64+avx2" => x86::transform_row_avx2(blocks, quantization, samples, stride),
        _ => transform_row_portable(blocks, quantization, samples, stride),
    }
}

#[inline(always)]
fn transform_row_portable(blocks: &[Block], quantization: &[u16; 64], samples: &mut [u8], stride: usize) {
    for (i, block) in blocks.iter().enumerate() {
        let bytes = transform(block, quantization);
        for (y, row) in bytes.iter().enumerate() {
            samples[y * stride + 8 * i..][..8].copy_from_slice(row);
        }
    }
}

/// Transforms one block.
#[inline(always)]
fn transform(block: &Block, quantization: &[u16; 64]) -> [[u8; 8]; 8] {
    let mut rows = [[0i16; 8]; 8];
    for (i, (value, step)) in block.iter().zip(quantization).enumerate() {
        rows[i / 8][i % 8] = value.wrapping_mul(*step as i16);
    }
    let has_ac_rows = rows[1..].iter().flatten().any(|value| *value != 0);
    let columns = if has_ac_rows {
        pass::<COLUMNS_SHIFT>(rows)
    } else {
        // Only the first row is nonzero: the pass is a shift, which wraps.
        [rows[0].map(|value| value << 2); 8]
    };
    let rows = transposed(pass::<ROWS_SHIFT>(transposed(columns)));
    rows.map(|row| row.map(|value| (i32::from(value).clamp(-128, 127) + 128) as u8))
}

/// Transforms along one dimension, for eight columns at a time.
#[inline(always)]
fn pass<const SHIFT: i32>(x: [[i16; 8]; 8]) -> [[i16; 8]; 8] {
    let mut out = [[0; 8]; 8];
    for column in 0..8 {
        let x = x.map(|row| row[column]);
        let [e_0, e_1] = [x[0].wrapping_add(x[4]), x[0].wrapping_sub(x[4])].map(|e| i32::from(e) << 13);
        let [e_3, e_2] = [factors::E_3, factors::E_2].map(|factors| dot([x[2], x[6]], factors));
        let sums = [x[7].wrapping_add(x[3]), x[5].wrapping_add(x[1])];
        let [z_3, z_4] = [factors::Z_3, factors::Z_4].map(|factors| dot(sums, factors));
        let o = [
            dot([x[7], x[1]], factors::O_0).wrapping_add(z_3),
            dot([x[5], x[3]], factors::O_1).wrapping_add(z_4),
            dot([x[5], x[3]], factors::O_2).wrapping_add(z_3),
            dot([x[7], x[1]], factors::O_3).wrapping_add(z_4),
        ];
        let t = [e_0.wrapping_add(e_3), e_1.wrapping_add(e_2), e_1.wrapping_sub(e_2), e_0.wrapping_sub(e_3)];
        for i in 0..4 {
            out[i][column] = round_shift::<SHIFT>(t[i].wrapping_add(o[3 - i]));
            out[7 - i][column] = round_shift::<SHIFT>(t[i].wrapping_sub(o[3 - i]));
        }
    }
    out
}

/// Returns the sum of the products of two inputs and their factors.
#[inline(always)]
fn dot([a, b]: [i16; 2], factors: [i32; 2]) -> i32 {
    i32::from(a) * factors[0] + i32::from(b) * factors[1]
}

/// Shifts to the right by `SHIFT` bits with rounding, and saturates to 16 bits.
#[inline(always)]
fn round_shift<const SHIFT: i32>(value: i32) -> i16 {
    let shifted = value.wrapping_add(1 << (SHIFT - 1)) >> SHIFT;
    shifted.clamp(i32::from(i16::MIN), i32::from(i16::MAX)) as i16
}

#[inline(always)]
fn transposed(rows: [[i16; 8]; 8]) -> [[i16; 8]; 8] {
    std::array::from_fn(|x| rows.map(|row| row[x]))
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Vector code for two blocks at a time, one in each half of a vector.

    use std::arch::x86_64::*;

    use super::{COLUMNS_SHIFT, ROWS_SHIFT, factors};
    use crate::jpeg::coefficients::Block;

    #[target_feature(enable = "avx2")]
    #[inline]
    pub(super) fn transform_row_avx2(
        blocks: &[Block],
        quantization: &[u16; 64],
        samples: &mut [u8],
        stride: usize,
    ) {
        let steps = bytemuck::cast::<[u16; 64], [__m128i; 8]>(*quantization)
            .map(|row| _mm256_broadcastsi128_si256(row));
        let (pairs, last) = blocks.as_chunks::<2>();
        for (i, pair) in pairs.iter().enumerate() {
            let rows = transform(pair.each_ref(), &steps);
            for (y, [left, right]) in rows.iter().enumerate() {
                let out = &mut samples[y * stride + 16 * i..][..16];
                out[..8].copy_from_slice(left);
                out[8..].copy_from_slice(right);
            }
        }
        if let [block] = last {
            let rows = transform([block, block], &steps);
            for (y, [row, _]) in rows.iter().enumerate() {
                samples[y * stride + 16 * pairs.len()..][..8].copy_from_slice(row);
            }
        }
    }

    /// Transforms two blocks; returns the rows of both.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn transform([left, right]: [&Block; 2], steps: &[__m256i; 8]) -> [[[u8; 8]; 2]; 8] {
        let [left, right] = [left, right].map(|block| bytemuck::cast::<Block, [__m128i; 8]>(*block));
        let mut rows = [_mm256_setzero_si256(); 8];
        for (y, row) in rows.iter_mut().enumerate() {
            *row = _mm256_mullo_epi16(_mm256_set_m128i(right[y], left[y]), steps[y]);
        }
        let mut ac_rows = rows[1];
        for row in &rows[2..] {
            ac_rows = _mm256_or_si256(ac_rows, *row);
        }
        let zeros = _mm256_movemask_epi8(_mm256_cmpeq_epi8(ac_rows, _mm256_setzero_si256()));
        let left_is_shift = zeros & 0xffff == 0xffff;
        let right_is_shift = zeros >> 16 == -1;
        // Only the first row is nonzero: the pass is a shift, which wraps.
        let shifted = _mm256_slli_epi16::<2>(rows[0]);
        let columns = if left_is_shift && right_is_shift {
            [shifted; 8]
        } else if left_is_shift {
            pass::<COLUMNS_SHIFT>(rows).map(|row| _mm256_blend_epi32::<0b0000_1111>(row, shifted))
        } else if right_is_shift {
            pass::<COLUMNS_SHIFT>(rows).map(|row| _mm256_blend_epi32::<0b1111_0000>(row, shifted))
        } else {
            pass::<COLUMNS_SHIFT>(rows)
        };
        bytes(pass::<ROWS_SHIFT>(transposed(columns)))
    }

    /// Transforms along one dimension, for the eight columns of both blocks.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn pass<const SHIFT: i32>(x: [__m256i; 8]) -> [__m256i; 8] {
        let low_half = half::<SHIFT>(x, |a, b| _mm256_unpacklo_epi16(a, b));
        let high_half = half::<SHIFT>(x, |a, b| _mm256_unpackhi_epi16(a, b));
        let mut out = [_mm256_setzero_si256(); 8];
        for (i, out) in out.iter_mut().enumerate() {
            *out = _mm256_packs_epi32(low_half[i], high_half[i]);
        }
        out
    }

    /// Transforms along one dimension, for the columns that `unpack` interleaves.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn half<const SHIFT: i32>(x: [__m256i; 8], unpack: impl Fn(__m256i, __m256i) -> __m256i) -> [__m256i; 8] {
        // Unpacking with zeros shifts to the left by 16 bits, of which 13 are kept.
        let zero = _mm256_setzero_si256();
        let e_0 = _mm256_srai_epi32::<3>(unpack(zero, _mm256_add_epi16(x[0], x[4])));
        let e_1 = _mm256_srai_epi32::<3>(unpack(zero, _mm256_sub_epi16(x[0], x[4])));
        let x_26 = unpack(x[2], x[6]);
        let e_3 = dot(x_26, factors::E_3);
        let e_2 = dot(x_26, factors::E_2);
        let sums = unpack(_mm256_add_epi16(x[7], x[3]), _mm256_add_epi16(x[5], x[1]));
        let z_3 = dot(sums, factors::Z_3);
        let z_4 = dot(sums, factors::Z_4);
        let x_71 = unpack(x[7], x[1]);
        let x_53 = unpack(x[5], x[3]);
        let o = [
            _mm256_add_epi32(dot(x_71, factors::O_0), z_3),
            _mm256_add_epi32(dot(x_53, factors::O_1), z_4),
            _mm256_add_epi32(dot(x_53, factors::O_2), z_3),
            _mm256_add_epi32(dot(x_71, factors::O_3), z_4),
        ];
        let t = [
            _mm256_add_epi32(e_0, e_3),
            _mm256_add_epi32(e_1, e_2),
            _mm256_sub_epi32(e_1, e_2),
            _mm256_sub_epi32(e_0, e_3),
        ];
        let mut out = [_mm256_setzero_si256(); 8];
        for i in 0..4 {
            let t = _mm256_add_epi32(t[i], _mm256_set1_epi32(1 << (SHIFT - 1)));
            out[i] = _mm256_srai_epi32::<SHIFT>(_mm256_add_epi32(t, o[3 - i]));
            out[7 - i] = _mm256_srai_epi32::<SHIFT>(_mm256_sub_epi32(t, o[3 - i]));
        }
        out
    }

    /// Returns the sums of the products of pairs of inputs and their factors.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn dot(pairs: __m256i, [a, b]: [i32; 2]) -> __m256i {
        _mm256_madd_epi16(pairs, _mm256_set1_epi32((a & 0xffff) | b << 16))
    }

    /// Transposes rows into columns, within each half.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn transposed(x: [__m256i; 8]) -> [__m256i; 8] {
        let lo16 = _mm256_unpacklo_epi16;
        let hi16 = _mm256_unpackhi_epi16;
        let a = [lo16(x[0], x[1]), lo16(x[2], x[3]), lo16(x[4], x[5]), lo16(x[6], x[7])];
        let b = [hi16(x[0], x[1]), hi16(x[2], x[3]), hi16(x[4], x[5]), hi16(x[6], x[7])];
        let [c_0, c_1, c_2, c_3] = transposed_quarters(a);
        let [c_4, c_5, c_6, c_7] = transposed_quarters(b);
        [c_0, c_1, c_2, c_3, c_4, c_5, c_6, c_7]
    }

    /// Returns four columns of interleaved pairs of rows, within each half.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn transposed_quarters(x: [__m256i; 4]) -> [__m256i; 4] {
        let first = [_mm256_unpacklo_epi32(x[0], x[1]), _mm256_unpackhi_epi32(x[0], x[1])];
        let second = [_mm256_unpacklo_epi32(x[2], x[3]), _mm256_unpackhi_epi32(x[2], x[3])];
        [
            _mm256_unpacklo_epi64(first[0], second[0]),
            _mm256_unpackhi_epi64(first[0], second[0]),
            _mm256_unpacklo_epi64(first[1], second[1]),
            _mm256_unpackhi_epi64(first[1], second[1]),
        ]
    }

    /// Converts columns of samples around zero to rows of bytes: row, block, column.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn bytes(x: [__m256i; 8]) -> [[[u8; 8]; 2]; 8] {
        let even = packed(x[0], x[2]);
        let odd = packed(x[1], x[3]);
        let c_01 = _mm256_unpacklo_epi8(even, odd);
        let c_23 = _mm256_unpackhi_epi8(even, odd);
        let even = packed(x[4], x[6]);
        let odd = packed(x[5], x[7]);
        let c_45 = _mm256_unpacklo_epi8(even, odd);
        let c_67 = _mm256_unpackhi_epi8(even, odd);
        let upper = [_mm256_unpacklo_epi16(c_01, c_23), _mm256_unpacklo_epi16(c_45, c_67)];
        let lower = [_mm256_unpackhi_epi16(c_01, c_23), _mm256_unpackhi_epi16(c_45, c_67)];
        let pairs = [
            _mm256_unpacklo_epi32(upper[0], upper[1]),
            _mm256_unpackhi_epi32(upper[0], upper[1]),
            _mm256_unpacklo_epi32(lower[0], lower[1]),
            _mm256_unpackhi_epi32(lower[0], lower[1]),
        ];
        // Each vector holds two rows of the left block, then the same two of the right one.
        let pairs = pairs.map(bytemuck::cast::<__m256i, [[[u8; 8]; 2]; 2]>);
        std::array::from_fn(|y| pairs[y / 2].map(|block| block[y % 2]))
    }

    /// Packs samples around zero into bytes, saturated and shifted by 128.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn packed(a: __m256i, b: __m256i) -> __m256i {
        _mm256_add_epi8(_mm256_packs_epi16(a, b), _mm256_set1_epi8(-128))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Transforms a row of blocks in the widest vectors of this machine.
    fn widest(blocks: &[Block], quantization: &[u16; 64]) -> Vec<u8> {
        let mut samples = vec![0; 64 * blocks.len()];
        transform_row(blocks, quantization, &mut samples, 8 * blocks.len());
        samples
    }

    fn portable(blocks: &[Block], quantization: &[u16; 64]) -> Vec<u8> {
        let mut samples = vec![0; 64 * blocks.len()];
        transform_row_portable(blocks, quantization, &mut samples, 8 * blocks.len());
        samples
    }

    /// Returns basis function `u` of the cosine transform at `x`.
    fn cosine_basis(x: usize, u: usize) -> f64 {
        let angle = (2 * x + 1) as f64 * u as f64 * std::f64::consts::PI / 16.0;
        if u == 0 { 0.125f64.sqrt() } else { angle.cos() / 2.0 }
    }

    proptest! {
        #[test]
        fn vector_code_equals_portable_code(
            values in prop::collection::vec((0usize..192, -1200i16..1200), 0..90), step in 1u16..60,
        ) {
            let mut blocks = [[0; 64]; 3];
            for (at, value) in values {
                blocks[at / 64][at % 64] = value;
            }
            let quantization = std::array::from_fn(|i| step + i as u16 / 8);
            prop_assert_eq!(widest(&blocks, &quantization), portable(&blocks, &quantization));
        }

        /// Comparison with the definition of the transform, in f64.
        #[test]
        fn samples_equal_the_cosine_transform_up_to_rounding(
            values in prop::collection::vec((0usize..64, -200i16..200), 0..20), step in 1u16..5,
        ) {
            let mut block = [0; 64];
            for (at, value) in values {
                block[at] = value;
            }
            let samples = widest(&[block], &[step; 64]);
            for (i, sample) in samples.into_iter().enumerate() {
                let mut sum = 0.0;
                for (j, value) in block.iter().enumerate() {
                    let dequantized = f64::from(*value) * f64::from(step);
                    sum += dequantized * cosine_basis(i % 8, j % 8) * cosine_basis(i / 8, j / 8);
                }
                let expected = (sum + 128.0).clamp(0.0, 255.0);
                prop_assert!((f64::from(sample) - expected).abs() < 1.05, "{sample} {expected}");
            }
        }
    }
}
