//! A tile of a product: as many sums as registers hold, from one panel of rows and one of columns.

use multiversion::{multiversion, target::match_target};

/// Rows of a tile.
pub(super) const ROWS: usize = 4;

/// Pairs that a vector has: one of each of 16 columns.
pub(super) type Lanes = [u32; N_LANES];

/// Columns of a vector.
pub(super) const N_LANES: usize = 16;

/// Vectors of a tile, at most.
pub(super) const VECTORS: usize = 4;

/// Columns of a tile, at most.
pub(super) const COLUMNS: usize = VECTORS * N_LANES;

/// Sums by row, vector and lane.
pub(super) type Tile = [[[f32; N_LANES]; VECTORS]; ROWS];

/// The sums of a tile with `n_vectors` vectors, those of the others as they were. `rows` has the pairs of ROWS rows one after
/// another, `columns` those of as many vectors.
pub(super) fn multiply(rows: &[[u32; ROWS]], columns: &[Lanes], n_vectors: usize, tile: &mut Tile) {
    match n_vectors {
        1 => of_vectors::<1>(rows, columns, tile),
        2 => of_vectors::<2>(rows, columns, tile),
        3 => of_vectors::<3>(rows, columns, tile),
        _ => of_vectors::<4>(rows, columns, tile),
    }
}

#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx512bf16",
    "x86_64+avx512f+avx512dq+avx512vl+fma",
    "x86_64+avx2+fma"
))]
fn of_vectors<const N: usize>(rows: &[[u32; ROWS]], columns: &[Lanes], tile: &mut Tile) {
    let columns = columns.as_chunks::<N>().0;
    match_target! {
        "x86_64+avx512bf16" => x86::by_pairs(rows, columns, tile),
        "x86_64+fma" => by_numbers(rows, columns, tile, f32::mul_add),
        _ => by_numbers(rows, columns, tile, |a, b, c| a * b + c),
    }
}

/// Each pair is two multiply-adds in f32, of which it does not matter how they round a product: that of two bf16 is exact. One vector of columns after the other: more sums than its own would not fit the
/// registers of AVX2.
#[inline(always)]
fn by_numbers<const N: usize>(
    rows: &[[u32; ROWS]],
    columns: &[[Lanes; N]],
    tile: &mut Tile,
    multiply_add: impl Fn(f32, f32, f32) -> f32,
) {
    for vector in 0..N {
        let mut sums = [[0.0f32; N_LANES]; ROWS];
        for (row, columns) in rows.iter().zip(columns) {
            let lanes = &columns[vector];
            for (sums, pair) in sums.iter_mut().zip(row) {
                let [first, second] = halves(*pair);
                for (sum, lane) in sums.iter_mut().zip(lanes) {
                    let [x, y] = halves(*lane);
                    *sum = multiply_add(second, y, multiply_add(first, x, *sum));
                }
            }
        }
        for (tile, sums) in tile.iter_mut().zip(sums) {
            tile[vector] = sums;
        }
    }
}

/// Both numbers of a pair in f32.
#[inline(always)]
fn halves(pair: u32) -> [f32; 2] {
    [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)]
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Lanes, ROWS, Tile};

    /// Each pair is one lane of `vdpbf16ps`.
    #[target_feature(enable = "avx512f,avx512bf16")]
    #[inline]
    pub(super) fn by_pairs<const N: usize>(rows: &[[u32; ROWS]], columns: &[[Lanes; N]], tile: &mut Tile) {
        let mut sums = [[_mm512_setzero_ps(); N]; ROWS];
        for (row, columns) in rows.iter().zip(columns) {
            let columns: [__m512bh; N] = columns.map(bytemuck::cast);
            for (sums, pair) in sums.iter_mut().zip(row) {
                let row: __m512bh = bytemuck::cast(_mm512_set1_epi32(pair.cast_signed()));
                for (sum, columns) in sums.iter_mut().zip(columns) {
                    *sum = _mm512_dpbf16_ps(*sum, row, columns);
                }
            }
        }
        for (tile, sums) in tile.iter_mut().zip(sums) {
            for (tile, sums) in tile.iter_mut().zip(sums) {
                *tile = bytemuck::cast(sums);
            }
        }
    }
}
