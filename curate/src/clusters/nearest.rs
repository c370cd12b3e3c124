//! Search of the nearest center of every row, divided over ranks.

use std::ops::Range;

use kernels::rows::{NearestCenter, Rows, find_nearest_centers};
use ranks::communicator::Communicator;

use crate::CurateError;
use crate::rows::part_of_rank;
use pipeline::Progress;

/// Number of rows that are compared before progress is reported: a multiple of a block.
pub(super) const STRIDE: usize = 128 * NearestCenter::BLOCK_ROWS;

/// Centers, and the nearest center of every row.
pub(super) struct Assignment {
    /// Centers, `[K, D]`.
    pub(super) centers: Vec<f32>,
    /// Nearest center of each row.
    pub(super) nearest: Vec<NearestCenter>,
}

/// Returns the nearest of `centers` of every row; all ranks call it.
pub(super) fn assign_rows(
    rows: &dyn Rows,
    centers: &[f32],
    ranks: &Communicator,
    progress: &dyn Progress,
) -> Result<Vec<NearestCenter>, CurateError> {
    let topology = ranks.topology();
    let part = part_of_rank(rows.len(), topology.rank, topology.world_size);
    let mut nearest = vec![NearestCenter::NONE; part.len()];
    progress.begin("distances", part.len() as u64);
    find_nearest(rows, part, centers, 0, &mut nearest, Some(progress));
    gather_nearest(&nearest, ranks)
}

/// Returns the nearest centers of all rows; `nearest` are the centers of this rank's rows.
pub(super) fn gather_nearest(
    nearest: &[NearestCenter],
    ranks: &Communicator,
) -> Result<Vec<NearestCenter>, CurateError> {
    let words: Vec<u32> =
        nearest.iter().flat_map(|nearest| [nearest.cell, nearest.distance.to_bits()]).collect();
    let parts = ranks.gather_bytes("nearest centers", bytemuck::cast_slice(&words).to_vec())?;
    let mut all = Vec::new();
    for part in parts {
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(&part);
        for pair in words.chunks_exact(2) {
            all.push(NearestCenter { cell: pair[0], distance: f32::from_bits(pair[1]) });
        }
    }
    Ok(all)
}

/// Compares rows `range` with `centers`, whose indices begin with `first_cell`, [`STRIDE`] rows at
/// a time.
pub(super) fn find_nearest(
    rows: &dyn Rows,
    range: Range<usize>,
    centers: &[f32],
    first_cell: u32,
    nearest: &mut [NearestCenter],
    progress: Option<&dyn Progress>,
) {
    for (index, nearest) in nearest.chunks_mut(STRIDE).enumerate() {
        let start = range.start + index * STRIDE;
        find_nearest_centers(rows, start..start + nearest.len(), centers, first_cell, nearest);
        if let Some(progress) = progress {
            progress.advance(nearest.len() as u64);
        }
    }
}
