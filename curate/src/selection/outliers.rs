//! Outliers: rows that are not similar to any other.
//!
//! ```text
//! s_i = mean of x_i · x_j over the k most similar other rows j of the cell
//! ```

use std::ops::Range;

use kernels::rows::{Rows, nearest_rows};
use ranks::communicator::Communicator;
use rayon::prelude::*;

use super::cells::Cells;
use crate::CurateError;
use crate::rows::{SelectedRows, part_of_rank};
use pipeline::Progress;

/// Number of rows that are compared before progress is reported.
const STRIDE: usize = 8192;

/// Returns the mean cosine similarity of each of `rows`, of unit length, to the `k` most similar
/// others of its cell, or to all others if there are fewer; 0 for the only row of a cell.
///
/// # Errors
/// [`CurateError::Ranks`].
pub fn mean_similarities(
    rows: &dyn Rows,
    cells: &Cells,
    k: usize,
    ranks: &Communicator,
    progress: &dyn Progress,
) -> Result<Vec<f32>, CurateError> {
    let n = rows.len();
    let topology = ranks.topology();
    progress.begin("neighbors", n as u64);
    let local: Vec<(u32, f32)> = match cells.rows() {
        [cell] => {
            let part = part_of_rank(cell.len(), topology.rank, topology.world_size);
            similarities_in_part(rows, cell, part, k, progress)
        }
        all => {
            let cells: Vec<&Vec<u32>> = all.iter().skip(topology.rank).step_by(topology.world_size).collect();
            let by_cell: Vec<Vec<(u32, f32)>> = cells
                .par_iter()
                .map(|cell| similarities_in_part(rows, cell, 0..cell.len(), k, progress))
                .collect();
            by_cell.concat()
        }
    };
    let words: Vec<u32> = local.iter().flat_map(|(row, mean)| [*row, mean.to_bits()]).collect();
    let mut means = vec![0.0; n];
    for part in ranks.gather_bytes("similarities", bytemuck::cast_slice(&words).to_vec())? {
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(&part);
        words.chunks_exact(2).for_each(|pair| means[pair[0] as usize] = f32::from_bits(pair[1]));
    }
    Ok(means)
}

/// Returns rows `part` of `cell` with their mean similarities.
fn similarities_in_part(
    rows: &dyn Rows,
    cell: &[u32],
    part: Range<usize>,
    k: usize,
    progress: &dyn Progress,
) -> Vec<(u32, f32)> {
    let candidates = SelectedRows::new(rows, cell);
    let mut similarities = Vec::with_capacity(part.len());
    for start in part.clone().step_by(STRIDE) {
        let indices = start..part.end.min(start + STRIDE);
        let queries = SelectedRows::new(rows, &cell[indices.clone()]);
        // One more, because a row is the most similar to itself.
        let neighbors = nearest_rows(&candidates, &queries, k.saturating_add(1), false);
        for (index, neighbors) in indices.clone().zip(neighbors) {
            let mut sum = 0.0f64;
            let mut n = 0u32;
            for (_, similarity) in neighbors.iter().filter(|(other, _)| *other as usize != index).take(k) {
                sum += f64::from(*similarity);
                n += 1;
            }
            similarities.push((cell[index], (sum / f64::from(n.max(1))) as f32));
        }
        progress.advance(indices.len() as u64);
    }
    similarities
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{FeatureRows, Metric};
    use pipeline::NoProgress;

    #[test]
    fn an_outlier_has_the_smallest_mean_similarity() {
        let values = vec![1.0f32, 0.0, 1.0, 0.1, 1.0, -0.1, -1.0, 0.3];
        let rows = FeatureRows::new(2, vec![Arc::new(values)], Metric::Cosine).unwrap();
        let means =
            mean_similarities(&rows, &Cells::single(4), 2, &Communicator::solo(), &NoProgress).unwrap();
        assert!(means[..3].iter().all(|mean| *mean > 0.95) && means[3] < 0.0, "{means:?}");
        let cells = Cells::from_rows(vec![vec![0, 1, 2], vec![3]]);
        let means = mean_similarities(&rows, &cells, 2, &Communicator::solo(), &NoProgress).unwrap();
        assert!(means[0] > 0.95 && means[3] == 0.0, "{means:?}");
    }
}
