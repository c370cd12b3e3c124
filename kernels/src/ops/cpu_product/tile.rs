//! A tile of a product: as many sums as registers hold, from one panel of rows and one of columns.

use half::bf16;
use multiversion::{multiversion, target::match_target};

/// Rows of a tile.
pub(super) const ROWS: usize = 4;

/// Pairs of 16 columns.
pub(in crate::ops) type Lanes = [u32; N_LANES];

/// Sums of 16 columns.
pub(in crate::ops) type LaneSums = [f32; N_LANES];

/// Columns of a vector.
pub(in crate::ops) const N_LANES: usize = 16;

/// Vectors of a tile, at most.
pub(super) const VECTORS: usize = 4;

/// Columns of a tile, at most.
pub(super) const COLUMNS: usize = VECTORS * N_LANES;

/// Sums by row, vector and lane.
pub(super) type Tile = [[LaneSums; VECTORS]; ROWS];

/// Computes the sums of a tile with `n_vectors` vectors; the other vectors of `tile` are not
/// changed. `rows` holds the pairs of ROWS rows one after another, `columns` those of `n_vectors`
/// vectors.
pub(super) fn multiply(rows: &[[u32; ROWS]], columns: &[Lanes], n_vectors: usize, tile: &mut Tile) {
    match n_vectors {
        1 => multiply_vectors::<1>(rows, columns, tile),
        2 => multiply_vectors::<2>(rows, columns, tile),
        3 => multiply_vectors::<3>(rows, columns, tile),
        _ => multiply_vectors::<4>(rows, columns, tile),
    }
}

/// One run of each of ROWS rows, in memory without packing; all have the same even length.
pub(super) type Runs<'a> = [&'a [bf16]; ROWS];

/// Computes the sums of a tile as [`multiply`], from the `runs` of the rows, one after another.
pub(super) fn multiply_runs(runs: &[Runs<'_>], columns: &[Lanes], n_vectors: usize, tile: &mut Tile) {
    match n_vectors {
        1 => multiply_run_vectors::<1>(runs, columns, tile),
        2 => multiply_run_vectors::<2>(runs, columns, tile),
        3 => multiply_run_vectors::<3>(runs, columns, tile),
        _ => multiply_run_vectors::<4>(runs, columns, tile),
    }
}

#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx512bf16",
    "x86_64+avx512f+avx512dq+avx512vl+fma",
    "x86_64+avx2+fma"
))]
fn multiply_run_vectors<const N: usize>(runs: &[Runs<'_>], columns: &[Lanes], tile: &mut Tile) {
    let columns = columns.as_chunks::<N>().0;
    match_target! {
        "x86_64+avx512bf16" => x86::by_runs(runs, columns, tile),
        "x86_64+fma" => numbers_by_runs(runs, columns, tile, |a, b, c| a.mul_add(b, c)),
        _ => numbers_by_runs(runs, columns, tile, |a, b, c| a * b + c),
    }
}

/// [`by_numbers`] of rows in runs, which are packed one after another.
#[inline(always)]
fn numbers_by_runs<const N: usize>(
    runs: &[Runs<'_>],
    columns: &[[Lanes; N]],
    tile: &mut Tile,
    multiply_add: impl Fn(f32, f32, f32) -> f32,
) {
    let rows: Vec<[u32; ROWS]> = runs.iter().flat_map(row_pairs).collect();
    by_numbers(&rows, columns, tile, multiply_add);
}

/// Returns the pairs of ROWS runs.
#[inline(always)]
fn row_pairs<'a>(runs: &Runs<'a>) -> impl Iterator<Item = [u32; ROWS]> + use<'a> {
    let [a, b, c, d] = runs.map(|run| run.as_chunks::<2>().0.iter());
    a.zip(b).zip(c).zip(d).map(|(((a, b), c), d)| [pair_bits(a), pair_bits(b), pair_bits(c), pair_bits(d)])
}

#[inline(always)]
fn pair_bits(pair: &[bf16; 2]) -> u32 {
    bytemuck::cast(*pair)
}

#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx512bf16",
    "x86_64+avx512f+avx512dq+avx512vl+fma",
    "x86_64+avx2+fma"
))]
fn multiply_vectors<const N: usize>(rows: &[[u32; ROWS]], columns: &[Lanes], tile: &mut Tile) {
    let columns = columns.as_chunks::<N>().0;
    match_target! {
        "x86_64+avx512bf16" => x86::by_pairs(rows, columns, tile),
        "x86_64+fma" => by_numbers(rows, columns, tile, |a, b, c| a.mul_add(b, c)),
        _ => by_numbers(rows, columns, tile, |a, b, c| a * b + c),
    }
}

/// Computes products by [`plus_pair`]. One vector of columns at a time, because AVX2 lacks the
/// registers for more sums.
#[inline(always)]
fn by_numbers<const N: usize>(
    rows: &[[u32; ROWS]],
    columns: &[[Lanes; N]],
    tile: &mut Tile,
    multiply_add: impl Fn(f32, f32, f32) -> f32,
) {
    for vector in 0..N {
        let mut sums = [LaneSums::default(); ROWS];
        for (row, columns) in rows.iter().zip(columns) {
            for (sums, pair) in sums.iter_mut().zip(row) {
                *sums = plus_pair(*sums, *pair, &columns[vector], &multiply_add);
            }
        }
        for (tile, sums) in tile.iter_mut().zip(sums) {
            tile[vector] = sums;
        }
    }
}

/// Returns `sums` plus, in each lane, the two products of `pair` with that lane's pair: two f32
/// multiply-adds, that of the second numbers first, as `vdpbf16ps` does.
#[inline(always)]
pub(in crate::ops) fn plus_pair(
    mut sums: LaneSums,
    pair: u32,
    lanes: &Lanes,
    multiply_add: impl Fn(f32, f32, f32) -> f32,
) -> LaneSums {
    let [first, second] = halves(pair);
    for (sum, lane) in sums.iter_mut().zip(lanes) {
        let [x, y] = halves(*lane);
        *sum = multiply_add(first, x, multiply_add(second, y, *sum));
    }
    sums
}

/// Returns both numbers of a pair in f32.
#[inline(always)]
fn halves(pair: u32) -> [f32; 2] {
    [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)]
}

#[cfg(target_arch = "x86_64")]
pub(in crate::ops) mod x86 {
    //! Sums by `vdpbf16ps`.

    use std::arch::x86_64::*;

    use super::{LaneSums, Lanes, ROWS, Runs, Tile, row_pairs};

    /// [`super::plus_pair`] in one instruction.
    #[target_feature(enable = "avx512f,avx512bf16")]
    #[inline]
    pub(in crate::ops) fn plus_pair(sums: LaneSums, pair: u32, lanes: &Lanes) -> LaneSums {
        let row: __m512bh = bytemuck::cast(_mm512_set1_epi32(pair.cast_signed()));
        bytemuck::cast(_mm512_dpbf16_ps(bytemuck::cast(sums), row, bytemuck::cast(*lanes)))
    }

    /// Multiplies each pair in one lane of `vdpbf16ps`.
    #[target_feature(enable = "avx512f,avx512bf16")]
    #[inline]
    pub(super) fn by_pairs<const N: usize>(rows: &[[u32; ROWS]], columns: &[[Lanes; N]], tile: &mut Tile) {
        let mut sums = [[_mm512_setzero_ps(); N]; ROWS];
        for (row, columns) in rows.iter().zip(columns) {
            add_pair(&mut sums, *row, columns);
        }
        store(sums, tile);
    }

    /// [`by_pairs`] of rows in runs.
    #[target_feature(enable = "avx512f,avx512bf16")]
    #[inline]
    pub(super) fn by_runs<const N: usize>(runs: &[Runs<'_>], columns: &[[Lanes; N]], tile: &mut Tile) {
        let mut sums = [[_mm512_setzero_ps(); N]; ROWS];
        let mut columns = columns.iter();
        for runs in runs {
            for (row, columns) in row_pairs(runs).zip(columns.by_ref()) {
                add_pair(&mut sums, row, columns);
            }
        }
        store(sums, tile);
    }

    /// Adds the products of a pair of each row and a pair of each column.
    #[target_feature(enable = "avx512f,avx512bf16")]
    #[inline]
    fn add_pair<const N: usize>(sums: &mut [[__m512; N]; ROWS], row: [u32; ROWS], columns: &[Lanes; N]) {
        let columns: [__m512bh; N] = columns.map(bytemuck::cast);
        for (sums, pair) in sums.iter_mut().zip(row) {
            let row: __m512bh = bytemuck::cast(_mm512_set1_epi32(pair.cast_signed()));
            for (sum, columns) in sums.iter_mut().zip(columns) {
                *sum = _mm512_dpbf16_ps(*sum, row, columns);
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    fn store<const N: usize>(sums: [[__m512; N]; ROWS], tile: &mut Tile) {
        for (tile, sums) in tile.iter_mut().zip(sums) {
            for (tile, sums) in tile.iter_mut().zip(sums) {
                *tile = bytemuck::cast(sums);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::number::Number;

    fn number(i: usize) -> f32 {
        (i as f32 * 0.71).sin() * 10f32.powi((i * 7 % 13) as i32 - 6)
    }

    fn pair(i: usize) -> u32 {
        u32::from(number(i).bf16_bits()) | u32::from(number(i + 5).bf16_bits()) << 16
    }

    /// Results without AVX512-BF16 or without fused multiply-add have the same bits as those with
    /// them.
    #[test]
    fn all_instruction_sets_give_the_same_bits() {
        let rows: Vec<[u32; ROWS]> = (0..37).map(|p| std::array::from_fn(|r| pair(p * ROWS + r))).collect();
        let columns: Vec<Lanes> =
            (0..37 * VECTORS).map(|v| std::array::from_fn(|l| pair(1000 + v * N_LANES + l))).collect();
        let mut chosen = Tile::default();
        multiply(&rows, &columns, VECTORS, &mut chosen);
        let vectors = columns.as_chunks::<VECTORS>().0;
        for fused in [true, false] {
            let multiply_add: fn(f32, f32, f32) -> f32 =
                if fused { f32::mul_add } else { |a, b, c| a * b + c };
            let mut tile = Tile::default();
            by_numbers(&rows, vectors, &mut tile, multiply_add);
            assert!(tile == chosen, "fused: {fused}");
        }
        assert!(chosen.as_flattened().as_flattened().iter().all(|sum| *sum != 0.0 && sum.is_finite()));
    }
}
