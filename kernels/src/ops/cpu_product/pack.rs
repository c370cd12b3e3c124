//! Packing of matrices into panels of pairs: one instruction multiplies pairs that are neighbors in
//! a panel.
//!
//! ```text
//! panel[p][l] = (line l, number 2p) | (line l, number 2p + 1) << 16        as bf16
//! ```
//!
//! Lines are the rows of the first matrix or the columns of the second. The missing lines of a
//! vector or panel are zero, as is the missing second number of an odd depth.

use std::ops::Range;

use multiversion::{multiversion, target::match_target};

use super::tile::{Lanes, N_LANES, ROWS};
use crate::ops::gemm::Mat;
use crate::ops::number::Number;

/// Lines that are packed at once, and pairs of each that are transposed at once.
pub(super) const LINES: usize = N_LANES;

/// Pairs indexed by line, or lines indexed by pair.
type Square = [Lanes; LINES];

/// Numbers of a line in a square.
const NUMBERS: usize = 2 * LINES;

/// Packs `lines` of `mat` with the numbers in `depth` as columns, in vectors of LINES lines:
/// `panel` holds all vectors of the first pair, then those of the second, and so on.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx512bf16",
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl",
    "x86_64+avx2"
))]
pub(in crate::ops) fn pack_columns<T: Number>(
    mat: Mat<'_, T>,
    lines: Range<usize>,
    depth: Range<usize>,
    panel: &mut [Lanes],
) {
    let n_vectors = lines.len().div_ceil(LINES);
    for (square, panel) in panel.chunks_mut(LINES * n_vectors).enumerate() {
        for vector in 0..n_vectors {
            let lines = part(&lines, vector, LINES);
            let numbers = part(&depth, square, NUMBERS);
            let lanes: Square = match_target! {
                "x86_64+avx512bf16" => x86::by_pair(mat, lines, numbers),
                _ => by_pair(mat, lines, numbers),
            };
            for (to, lanes) in panel[vector..].iter_mut().step_by(n_vectors).zip(&lanes) {
                *to = *lanes;
            }
        }
    }
}

/// Packs `lines` of `mat` with the numbers in `depth` as rows: consecutive panels of ROWS lines and
/// `n_pairs` pairs.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx512bf16",
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl",
    "x86_64+avx2"
))]
pub(super) fn pack_rows<T: Number>(
    mat: Mat<'_, T>,
    lines: Range<usize>,
    depth: Range<usize>,
    panels: &mut [[u32; ROWS]],
    n_pairs: usize,
) {
    let groups = lines.len().div_ceil(LINES);
    let squares = n_pairs.div_ceil(LINES);
    for i in 0..groups * squares {
        // If the lines are interleaved in memory, all groups are packed before the next square, so
        // that each cache line is read once.
        let (group, square) = match mat.col_stride {
            1 => (i / squares, i % squares),
            _ => (i % groups, i / groups),
        };
        let lines = part(&lines, group, LINES);
        let numbers = part(&depth, square, NUMBERS);
        let lanes: Square = match_target! {
            "x86_64+avx512bf16" => x86::by_pair(mat, lines, numbers),
            _ => by_pair(mat, lines, numbers),
        };
        let panels = panels[group * LINES / ROWS * n_pairs..].chunks_exact_mut(n_pairs);
        for (quarter, panel) in panels.take(LINES / ROWS).enumerate() {
            for (to, lanes) in panel[square * LINES..].iter_mut().zip(&lanes) {
                *to = lanes.as_chunks().0[quarter];
            }
        }
    }
}

/// Returns part `index` of a range divided into parts of `len`; an empty range past the end.
#[inline(always)]
fn part(range: &Range<usize>, index: usize, len: usize) -> Range<usize> {
    let start = range.end.min(range.start + index * len);
    start..range.end.min(start + len)
}

/// Returns the pairs of `numbers` of `lines`, with the lanes of each pair together.
#[inline(always)]
fn by_pair<T: Number>(mat: Mat<'_, T>, lines: Range<usize>, numbers: Range<usize>) -> Square {
    let mut square = Square::default();
    if mat.col_stride == 1 {
        for (l, line) in lines.enumerate() {
            let line = &mat.data[line * mat.row_stride..][numbers.clone()];
            for (lanes, pair) in square.iter_mut().zip(line.chunks(2)) {
                lanes[l] = pack_pair(pair[0], *pair.get(1).unwrap_or(&T::default()));
            }
        }
    } else {
        let zeros = [T::default(); LINES];
        for (lanes, k) in square.iter_mut().zip(numbers.clone().step_by(2)) {
            let first = &mat.data[k * mat.col_stride..][lines.clone()];
            let second = if k + 1 < numbers.end {
                &mat.data[(k + 1) * mat.col_stride..][lines.clone()]
            } else {
                &zeros
            };
            for ((lane, first), second) in lanes.iter_mut().zip(first).zip(second) {
                *lane = pack_pair(*first, *second);
            }
        }
    }
    square
}

/// Returns the bits of two numbers as bf16, the first in the lower half.
#[inline(always)]
pub(in crate::ops) fn pack_pair<T: Number>(first: T, second: T) -> u32 {
    u32::from(first.bf16_bits()) | (u32::from(second.bf16_bits()) << 16)
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! [`super::by_pair`] with vector instructions.

    use std::arch::x86_64::*;
    use std::ops::Range;

    use burn_tensor::DType;

    use super::{LINES, NUMBERS, Square};
    use crate::ops::gemm::Mat;
    use crate::ops::number::Number;

    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    pub(super) fn by_pair<T: Number>(mat: Mat<'_, T>, lines: Range<usize>, numbers: Range<usize>) -> Square {
        let mut square = [_mm512_setzero_si512(); LINES];
        if mat.col_stride == 1 {
            for (line_pairs, line) in square.iter_mut().zip(lines) {
                *line_pairs = pairs(&mat.data[line * mat.row_stride..][numbers.clone()]);
            }
            return bytemuck::cast(transposed(square));
        }
        for (lanes, k) in square.iter_mut().zip(numbers.clone().step_by(2)) {
            *lanes = wide_bits(&mat.data[k * mat.col_stride..][lines.clone()]);
            if k + 1 < numbers.end {
                let second = wide_bits(&mat.data[(k + 1) * mat.col_stride..][lines.clone()]);
                *lanes = _mm512_or_si512(*lanes, _mm512_slli_epi32::<16>(second));
            }
        }
        bytemuck::cast(square)
    }

    /// Returns the pairs of a line.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    fn pairs<T: Number>(numbers: &[T]) -> __m512i {
        let numbers: [T; NUMBERS] = padded(numbers);
        match T::DTYPE {
            DType::F32 => {
                let [low, high]: [__m512; 2] = bytemuck::pod_read_unaligned(bytemuck::bytes_of(&numbers));
                bytemuck::cast(_mm512_cvtne2ps_pbh(high, low))
            }
            _ => bytemuck::pod_read_unaligned(bytemuck::bytes_of(&numbers)),
        }
    }

    /// Returns the bits of numbers as bf16, one per lane.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    fn wide_bits<T: Number>(numbers: &[T]) -> __m512i {
        let numbers: [T; LINES] = padded(numbers);
        let bits: __m256i = match T::DTYPE {
            DType::F32 => {
                let numbers: __m512 = bytemuck::pod_read_unaligned(bytemuck::bytes_of(&numbers));
                bytemuck::cast(_mm512_cvtneps_pbh(numbers))
            }
            _ => bytemuck::pod_read_unaligned(bytemuck::bytes_of(&numbers)),
        };
        _mm512_cvtepu16_epi32(bits)
    }

    /// Pads `numbers` with zeros to length N.
    #[inline(always)]
    fn padded<T: Number, const N: usize>(numbers: &[T]) -> [T; N] {
        match numbers.first_chunk() {
            Some(numbers) => *numbers,
            None => {
                let mut padded = [T::default(); N];
                padded[..numbers.len()].copy_from_slice(numbers);
                padded
            }
        }
    }

    /// Transposes rows into columns: first within blocks of four by four, then the blocks.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn transposed(mut rows: [__m512i; LINES]) -> [__m512i; LINES] {
        let mut transposed = [_mm512_setzero_si512(); LINES];
        for four in rows.as_chunks_mut().0 {
            transpose_within(four);
        }
        for column in 0..4 {
            let blocks =
                transposed_blocks([rows[column], rows[4 + column], rows[8 + column], rows[12 + column]]);
            for j in 0..4 {
                transposed[4 * j + column] = blocks[j];
            }
        }
        transposed
    }

    /// Transposes each block of four numbers of four rows.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn transpose_within(rows: &mut [__m512i; 4]) {
        let [a, b, c, d] = *rows;
        let ab = _mm512_unpacklo_epi32(a, b);
        let ab_high = _mm512_unpackhi_epi32(a, b);
        let cd = _mm512_unpacklo_epi32(c, d);
        let cd_high = _mm512_unpackhi_epi32(c, d);
        *rows = [
            _mm512_unpacklo_epi64(ab, cd),
            _mm512_unpackhi_epi64(ab, cd),
            _mm512_unpacklo_epi64(ab_high, cd_high),
            _mm512_unpackhi_epi64(ab_high, cd_high),
        ];
    }

    /// Transposes four rows of four blocks: row `j` of the result holds block `j` of each.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn transposed_blocks([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
        const EVEN: i32 = 0b10_00_10_00;
        const ODD: i32 = 0b11_01_11_01;
        let even_ab = _mm512_shuffle_i32x4::<EVEN>(a, b);
        let odd_ab = _mm512_shuffle_i32x4::<ODD>(a, b);
        let even_cd = _mm512_shuffle_i32x4::<EVEN>(c, d);
        let odd_cd = _mm512_shuffle_i32x4::<ODD>(c, d);
        [
            _mm512_shuffle_i32x4::<EVEN>(even_ab, even_cd),
            _mm512_shuffle_i32x4::<EVEN>(odd_ab, odd_cd),
            _mm512_shuffle_i32x4::<ODD>(even_ab, even_cd),
            _mm512_shuffle_i32x4::<ODD>(odd_ab, odd_cd),
        ]
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;

    fn value(i: usize) -> f32 {
        const SPECIAL: [f32; 5] =
            [f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::from_bits(0x7f80_0001), -0.0];
        if i % 11 == 3 { SPECIAL[i % 5] } else { (i as f32 * 0.37).sin() }
    }

    fn to_bf16(values: &[f32]) -> Vec<bf16> {
        values.iter().map(|value| bf16::from_f32(*value)).collect()
    }

    proptest! {
        /// Covers both memory layouts, partial panels and odd depths; numbers outside the matrix
        /// are not packed.
        #[test]
        fn a_panel_has_the_pairs_of_its_lines(
            n_lines in 1usize..=3 * LINES,
            first in 0usize..3,
            depth in 0usize..70,
            start in 0usize..4,
        ) {
            let n_rows = first + n_lines + 2;
            let n_columns = start + depth + 3;
            let data: Vec<f32> = (0..n_rows * n_columns).map(value).collect();
            let transposed: Vec<f32> =
                (0..data.len()).map(|i| data[i % n_rows * n_columns + i / n_rows]).collect();
            // By line and pair, with zeros where there are no numbers.
            let mut expected = vec![[0u32; 36]; 3 * LINES];
            for (line, pairs) in expected.iter_mut().enumerate().take(n_lines) {
                for k in 0..depth {
                    let number = bf16::from_f32(data[(first + line) * n_columns + start + k]);
                    pairs[k / 2] |= u32::from(number.to_bits()) << (16 * (k % 2));
                }
            }
            let lines = first..first + n_lines;
            let numbers = start..start + depth;
            for mat in [Mat::rows(&data, n_columns), Mat::rows(&transposed, n_rows).t()] {
                let square = by_pair(mat, part(&lines, 0, LINES), part(&numbers, 0, NUMBERS));
                for (p, lanes) in square.iter().enumerate() {
                    for (l, lane) in lanes.iter().enumerate() {
                        prop_assert_eq!(*lane, expected[l][p]);
                    }
                }
            }
            let n_pairs = depth.div_ceil(2).max(1);
            let n_vectors = n_lines.div_ceil(LINES);
            let mut columns = vec![vec![[7u32; LINES]; n_pairs * n_vectors]; 4];
            let mut rows = vec![vec![[7u32; ROWS]; n_pairs * n_lines.div_ceil(ROWS)]; 4];
            let mats = [Mat::rows(&data, n_columns), Mat::rows(&transposed, n_rows).t()];
            for (i, mat) in mats.into_iter().enumerate() {
                pack_columns(mat, lines.clone(), numbers.clone(), &mut columns[i]);
                pack_rows(mat, lines.clone(), numbers.clone(), &mut rows[i], n_pairs);
            }
            let bf16_data = to_bf16(&data);
            let bf16_transposed = to_bf16(&transposed);
            let mats = [Mat::rows(&bf16_data, n_columns), Mat::rows(&bf16_transposed, n_rows).t()];
            for (i, mat) in mats.into_iter().enumerate() {
                pack_columns(mat, lines.clone(), numbers.clone(), &mut columns[2 + i]);
                pack_rows(mat, lines.clone(), numbers.clone(), &mut rows[2 + i], n_pairs);
            }
            for (i, lanes) in columns.iter().flat_map(|panel| panel.iter().enumerate()) {
                for (l, lane) in lanes.iter().enumerate() {
                    prop_assert_eq!(*lane, expected[i % n_vectors * LINES + l][i / n_vectors]);
                }
            }
            for (i, lanes) in rows.iter().flat_map(|panels| panels.iter().enumerate()) {
                for (r, lane) in lanes.iter().enumerate() {
                    prop_assert_eq!(*lane, expected[i / n_pairs * ROWS + r][i % n_pairs]);
                }
            }
        }
    }
}
