//! Replacement of the centers of empty clusters.

use std::ops::Range;

use kernels::rows::{NearestCenter, Rows};
use ranks::communicator::Communicator;

use super::seeds::{gather_smallest, keep_smallest};
use crate::CurateError;

/// Moves the center of each empty cluster to one of the rows that are farthest from their centers,
/// the farthest first, as scikit-learn does. Returns the number of centers that have moved.
pub(super) fn refill(
    rows: &dyn Rows,
    part: Range<usize>,
    nearest: &[NearestCenter],
    counts: &[f64],
    centers: &mut [f32],
    ranks: &Communicator,
) -> Result<usize, CurateError> {
    let empty: Vec<usize> = (0..counts.len()).filter(|cluster| counts[*cluster] == 0.0).collect();
    if empty.is_empty() {
        return Ok(0);
    }
    let mut keys: Vec<(f64, u64)> = Vec::new();
    for (row, nearest) in nearest.iter().enumerate() {
        if nearest.distance.is_finite() && nearest.distance > 0.0 {
            keys.push((-f64::from(nearest.distance), (part.start + row) as u64));
        }
    }
    keep_smallest(&mut keys, empty.len());
    let d = rows.width();
    let farthest = gather_smallest(rows, &keys, empty.len(), ranks)?.rows;
    for (cluster, row) in empty.iter().zip(farthest.chunks_exact(d)) {
        centers[cluster * d..(cluster + 1) * d].copy_from_slice(row);
    }
    Ok(farthest.len() / d)
}
