//! Initial centers of k-means: k-means++ in rounds (Arthur and Vassilvitskii 2007; Bahmani et
//! al. 2012).
//!
//! ```text
//! The first center is a random row. Each round adds up to m = K' rows as centers to the K' centers
//! so far; a row is drawn with a probability in proportion to D², the squared distance to its
//! nearest center.
//! ```
//!
//! k-means++ draws one row at a time, which takes a pass over all rows for each. A round draws 2 m
//! candidates at once, without replacement, by exponential keys (Efraimidis and Spirakis 2006): the
//! smallest of `-ln(u_i) / D_i²`, with `u_i` a function of seed, round and row. In the order of
//! their keys, each becomes a center with probability `D'² / D²`, with D' the distance to the
//! nearest center including those of the round, until there are m. Rows are thus drawn by D'², as
//! k-means++ draws them, in a dozen passes for 1,000 centers.

use std::cmp::Ordering;
use std::ops::Range;

use kernels::rows::{NearestCenter, Rows};
use ranks::communicator::Communicator;
use rayon::prelude::*;

use super::nearest::find_nearest;
use crate::CurateError;
use crate::draw::Draw;
use pipeline::Progress;

/// Largest number of centers that a round adds: they are compared with one another.
const MAX_PER_ROUND: usize = 1024;

/// Returns `n_clusters` rows as centers, `[K, D]`, or as many as there are different rows, and
/// stores the nearest center of each row of this rank's `part` in `nearest`.
pub(super) fn choose_seeds(
    rows: &dyn Rows,
    part: Range<usize>,
    n_clusters: usize,
    draw: Draw,
    ranks: &Communicator,
    nearest: &mut [NearestCenter],
    progress: &dyn Progress,
) -> Result<Vec<f32>, CurateError> {
    let d = rows.width();
    nearest.fill(NearestCenter::NONE);
    progress.begin("seeds", n_clusters as u64);
    let mut centers = Vec::with_capacity(n_clusters * d);
    for round in 0u64.. {
        let n_centers = centers.len() / d;
        let n_wanted = n_centers.clamp(1, MAX_PER_ROUND).min(n_clusters - n_centers);
        if n_wanted == 0 {
            break;
        }
        let n_candidates = if n_wanted == 1 { 1 } else { 2 * n_wanted };
        let draw = draw.stream(round);
        let local = draw_candidates(nearest, part.start, n_candidates, draw);
        let candidates = gather_smallest(rows, &local, n_candidates, ranks)?;
        let weights = candidates.keys.iter().map(|(key, row)| -draw.uniform(*row).ln() / key);
        let new = accept_candidates(&candidates.rows, d, weights, n_wanted, draw.stream(0));
        if new.is_empty() {
            // Every row lies on a center.
            break;
        }
        find_nearest(rows, part.clone(), &new, n_centers as u32, nearest, None);
        progress.advance((new.len() / d) as u64);
        centers.extend(new);
    }
    Ok(centers)
}

/// Returns up to `n` of `candidates`, `[M, D]`. Each is accepted with the probability `D'² / D²`,
/// with D' the distance to the nearest candidate accepted before, and D² its weight, the squared
/// distance by which it was drawn.
fn accept_candidates(
    candidates: &[f32],
    d: usize,
    weights: impl Iterator<Item = f64>,
    n: usize,
    draw: Draw,
) -> Vec<f32> {
    let mut new: Vec<f32> = Vec::with_capacity(n * d);
    for (index, (candidate, weight)) in candidates.chunks_exact(d).zip(weights).enumerate() {
        if new.len() == n * d {
            break;
        }
        let distances = new.par_chunks_exact(d).map(|center| squared_distance(candidate, center));
        let nearest = distances.reduce(|| f64::INFINITY, f64::min);
        if nearest > 0.0 && draw.uniform(index as u64) * weight <= nearest.min(weight) {
            new.extend(candidate);
        }
    }
    new
}

fn squared_distance(a: &[f32], b: &[f32]) -> f64 {
    let sum: f32 = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum();
    f64::from(sum)
}

/// Returns the `n` smallest keys of this rank's rows, with the indices of the rows; `start` is the
/// index of the first row.
fn draw_candidates(nearest: &[NearestCenter], start: usize, n: usize, draw: Draw) -> Vec<(f64, u64)> {
    let mut keys: Vec<(f64, u64)> = Vec::new();
    for (row, nearest) in nearest.iter().enumerate() {
        let row = (start + row) as u64;
        // Before the first center all distances are infinite, and all rows have the same weight.
        let weight = if nearest.distance.is_finite() { f64::from(nearest.distance) } else { 1.0 };
        if weight > 0.0 {
            keys.push((-draw.uniform(row).ln() / weight, row));
        }
    }
    keep_smallest(&mut keys, n);
    keys
}

/// Keeps the `n` smallest of `keys`, in order.
pub(super) fn keep_smallest(keys: &mut Vec<(f64, u64)>, n: usize) {
    if keys.len() > n && n > 0 {
        keys.select_nth_unstable_by(n - 1, compare_keys);
    }
    keys.truncate(n);
    keys.sort_unstable_by(compare_keys);
}

/// Compares keys and, of equal keys, the indices of the rows.
fn compare_keys(a: &(f64, u64), b: &(f64, u64)) -> Ordering {
    a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))
}

/// Rows with the smallest keys over all ranks.
pub(super) struct ChosenRows {
    /// Key and number of each row, in the order of the keys.
    keys: Vec<(f64, u64)>,
    /// The rows, `[n, D]`.
    pub(super) rows: Vec<f32>,
}

/// Returns the rows with the `n` smallest keys over all ranks; `local` holds the keys of this rank.
pub(super) fn gather_smallest(
    rows: &dyn Rows,
    local: &[(f64, u64)],
    n: usize,
    ranks: &Communicator,
) -> Result<ChosenRows, CurateError> {
    let d = rows.width();
    let mut keys = Vec::new();
    for part in ranks.gather_bytes("keys of rows", to_bytes(local))? {
        for bytes in part.chunks_exact(16) {
            let (key, row) = bytes.split_at(8);
            let key = u64::from_ne_bytes(key.try_into().unwrap_or_default());
            let row = u64::from_ne_bytes(row.try_into().unwrap_or_default());
            keys.push((f64::from_bits(key), row));
        }
    }
    keep_smallest(&mut keys, n);
    // Every rank can read every row: only the choice has to be exchanged.
    let mut chosen = vec![0.0; keys.len() * d];
    for ((_, row), out) in keys.iter().zip(chosen.chunks_exact_mut(d)) {
        rows.copy(*row as usize..*row as usize + 1, out);
    }
    Ok(ChosenRows { keys, rows: chosen })
}

fn to_bytes(keys: &[(f64, u64)]) -> Vec<u8> {
    keys.iter().flat_map(|(key, row)| [key.to_bits().to_ne_bytes(), row.to_ne_bytes()].concat()).collect()
}
