//! Clusters that have lost all of their rows.

use std::ops::Range;

use kernels::rows::{NearestCenter, Rows};
use ranks::communicator::Communicator;

use super::seeds::{agreed, smallest};
use crate::CurateError;

/// Moves each center without rows to one of the rows that are farthest from theirs, the farthest
/// first, as scikit-learn does. Returns the number of centers that have moved.
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
    let is_away = |nearest: &NearestCenter| nearest.distance.is_finite() && nearest.distance > 0.0;
    let mut keys: Vec<(f64, u64)> = nearest
        .iter()
        .enumerate()
        .filter_map(|(row, nearest)| {
            is_away(nearest).then_some((-f64::from(nearest.distance), (part.start + row) as u64))
        })
        .collect();
    smallest(&mut keys, empty.len());
    let d = rows.width();
    let farthest = agreed(rows, &keys, empty.len(), ranks)?.rows;
    for (cluster, row) in empty.iter().zip(farthest.chunks_exact(d)) {
        centers[cluster * d..(cluster + 1) * d].copy_from_slice(row);
    }
    Ok(farthest.len() / d)
}
