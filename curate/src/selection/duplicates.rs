//! Near-duplicates by cosine similarity, in cells (SemDeDup, Abbas et al. 2023) or among all rows.
//!
//! ```text
//! from the best row to the worst:
//! row i is a duplicate of the most similar row j, if x_i · x_j >= threshold
//! ```
//!
//! By the rule [`ComparedWith::Kept`], row j is a better row that is kept, so that a chain of
//! similar images does not join images that are far apart; by SemDeDup's rule, it is any better
//! row, so that more rows are duplicates. Of rows with equal similarity, the better one is
//! reported.
//!
//! Pairs are never stored: a set of equal images would have quadratically many.

use std::collections::HashMap;

use kernels::ops::gemm::{Mat, gemm};
use kernels::rows::{Rows, nearest_rows};
use ranks::communicator::Communicator;
use rayon::prelude::*;

use super::cells::Cells;
use crate::CurateError;
use crate::rows::SelectedRows;
use pipeline::{NoProgress, Progress};

/// Number of rows that are compared with kept rows at once.
const BLOCK: usize = 1024;

/// Rows that a row is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComparedWith {
    /// Better rows that are kept.
    Kept,
    /// All better rows, as SemDeDup does.
    All,
}

/// The most similar kept row of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NearestKept {
    /// Index of the kept row.
    pub row: u32,
    /// Cosine similarity.
    pub similarity: f32,
}

/// Near-duplicates of a set.
#[derive(Debug, Clone, PartialEq)]
pub struct Duplicates {
    /// Lowest similarity of a duplicate.
    pub threshold: f32,
    /// For each row, the most similar one among the better rows of its cell that are kept; `None`
    /// for the best row of a cell.
    pub nearest: Vec<Option<NearestKept>>,
}

impl Duplicates {
    /// Finds the duplicates among `rows` of unit length; `ranking` holds all rows of each cell, the
    /// best first.
    ///
    /// # Errors
    /// [`CurateError::Ranks`].
    pub fn find(
        rows: &dyn Rows,
        ranking: &Cells,
        threshold: f32,
        compared_with: ComparedWith,
        ranks: &Communicator,
        progress: &dyn Progress,
    ) -> Result<Self, CurateError> {
        progress.begin("near-duplicates", rows.len() as u64);
        let topology = ranks.topology();
        let mut nearest = vec![None; rows.len()];
        if let [cell] = ranking.rows() {
            let nearest_in_cell = compare_cell(rows, cell, threshold, compared_with, ranks, progress)?;
            for (row, nearest_kept) in cell.iter().zip(nearest_in_cell) {
                nearest[*row as usize] = nearest_kept;
            }
            return Ok(Self { threshold, nearest });
        }
        let local: Vec<&Vec<u32>> =
            ranking.rows().iter().skip(topology.rank).step_by(topology.world_size).collect();
        let by_cell: Vec<Vec<Option<NearestKept>>> = local
            .par_iter()
            .map(|cell| {
                let solo = Communicator::solo();
                let nearest_in_cell = compare_cell(rows, cell, threshold, compared_with, &solo, &NoProgress);
                progress.advance(cell.len() as u64);
                nearest_in_cell
            })
            .collect::<Result<_, _>>()?;
        let mut words = Vec::new();
        for (cell, nearest_in_cell) in local.iter().zip(&by_cell) {
            for (row, nearest_kept) in cell.iter().zip(nearest_in_cell) {
                if let Some(NearestKept { row: kept, similarity }) = nearest_kept {
                    words.extend([*row, *kept, similarity.to_bits()]);
                }
            }
        }
        for part in ranks.gather_bytes("near-duplicates", bytemuck::cast_slice(&words).to_vec())? {
            let words: Vec<u32> = bytemuck::pod_collect_to_vec(&part);
            for triple in words.chunks_exact(3) {
                let nearest_kept = NearestKept { row: triple[1], similarity: f32::from_bits(triple[2]) };
                nearest[triple[0] as usize] = Some(nearest_kept);
            }
        }
        Ok(Self { threshold, nearest })
    }

    /// Returns the row that row `i` duplicates, if it is a duplicate.
    pub fn original(&self, i: usize) -> Option<NearestKept> {
        self.nearest[i].filter(|nearest| nearest.similarity >= self.threshold)
    }

    /// Returns the kept row that row `i` duplicates, if it is a duplicate. If rows that are not
    /// kept are compared, too, that may be the original of its original, and so on.
    pub fn kept_original(&self, i: usize) -> Option<u32> {
        let mut row = self.original(i)?.row;
        // Rows come after their originals in the ranking, so that this ends.
        while let Some(original) = self.original(row as usize) {
            row = original.row;
        }
        Some(row)
    }

    /// Returns the rows that are kept.
    pub fn kept(&self) -> Vec<u32> {
        (0..self.nearest.len()).filter(|row| self.original(*row).is_none()).map(|row| row as u32).collect()
    }
}

/// Compares the rows of a cell, the best first; each rank compares them with a part of the kept
/// rows.
fn compare_cell(
    rows: &dyn Rows,
    cell: &[u32],
    threshold: f32,
    compared_with: ComparedWith,
    ranks: &Communicator,
    progress: &dyn Progress,
) -> Result<Vec<Option<NearestKept>>, CurateError> {
    let topology = ranks.topology();
    // Rows with which later ones are compared.
    let mut kept: Vec<u32> = Vec::new();
    let mut nearest_in_cell = Vec::with_capacity(cell.len());
    for block in cell.chunks(BLOCK) {
        let queries = SelectedRows::new(rows, block);
        let local: Vec<u32> =
            kept.chunks(BLOCK).skip(topology.rank).step_by(topology.world_size).flatten().copied().collect();
        let candidates = SelectedRows::new(rows, &local);
        let mut nearest_earlier: Vec<Option<NearestKept>> = Vec::with_capacity(block.len());
        for neighbors in nearest_rows(&candidates, &queries, 1, false) {
            let nearest = neighbors.first();
            nearest_earlier
                .push(nearest.map(|&(i, similarity)| NearestKept { row: local[i as usize], similarity }));
        }
        if topology.world_size > 1 {
            nearest_earlier = best_of_ranks(&nearest_earlier, &kept, ranks)?;
        }
        let similarities = pair_similarities(&queries);
        let mut is_kept = vec![false; block.len()];
        for (i, mut nearest) in nearest_earlier.into_iter().enumerate() {
            for j in (0..i).filter(|j| is_kept[*j]) {
                let similarity = similarities[i * block.len() + j];
                if nearest.is_none_or(|nearest| similarity > nearest.similarity) {
                    nearest = Some(NearestKept { row: block[j], similarity });
                }
            }
            is_kept[i] = compared_with == ComparedWith::All
                || nearest.is_none_or(|nearest| nearest.similarity < threshold);
            nearest_in_cell.push(nearest);
        }
        for (row, is_kept) in block.iter().zip(is_kept) {
            if is_kept {
                kept.push(*row);
            }
        }
        progress.advance(block.len() as u64);
    }
    Ok(nearest_in_cell)
}

/// Returns the products of all pairs of `rows`, `[n, n]`.
fn pair_similarities(rows: &dyn Rows) -> Vec<f32> {
    let n = rows.len();
    let d = rows.width();
    let mut values = vec![0.0; n * d];
    rows.copy(0..n, &mut values);
    let mut products = vec![0.0; n * n];
    let matrix = Mat::rows(&values, d);
    gemm([n, d, n], 1.0, matrix, matrix.t(), 0.0, &mut products, n);
    products
}

/// Returns the most similar kept row over all ranks, for each element of `local`; of equally
/// similar rows, the first in `kept`.
fn best_of_ranks(
    local: &[Option<NearestKept>],
    kept: &[u32],
    ranks: &Communicator,
) -> Result<Vec<Option<NearestKept>>, CurateError> {
    let mut words: Vec<u32> = Vec::with_capacity(2 * local.len());
    for nearest in local {
        match nearest {
            Some(nearest) => words.extend([nearest.row, nearest.similarity.to_bits()]),
            None => words.extend([u32::MAX, 0]),
        }
    }
    let parts = ranks.gather_bytes("kept rows", bytemuck::cast_slice(&words).to_vec())?;
    let position: HashMap<u32, usize> = kept.iter().copied().zip(0..).collect();
    let mut best: Vec<Option<NearestKept>> = vec![None; local.len()];
    for part in parts {
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(&part);
        for (best, pair) in best.iter_mut().zip(words.chunks_exact(2)) {
            let nearest = NearestKept { row: pair[0], similarity: f32::from_bits(pair[1]) };
            if nearest.row == u32::MAX {
                continue;
            }
            if let Some(best) = *best {
                let order = nearest.similarity.total_cmp(&best.similarity);
                if order.then(position[&best.row].cmp(&position[&nearest.row])).is_le() {
                    continue;
                }
            }
            *best = Some(nearest);
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::draw::Draw;
    use crate::{FeatureRows, Metric};

    /// Returns rows on a circle, at angles in degrees.
    fn circle(degrees: &[f32]) -> FeatureRows {
        let values: Vec<f32> =
            degrees.iter().flat_map(|a| [a.to_radians().cos(), a.to_radians().sin()]).collect();
        FeatureRows::new(2, vec![Arc::new(values)], Metric::Cosine).unwrap()
    }

    fn originals(
        rows: &FeatureRows,
        ranking: Vec<u32>,
        degrees: f32,
        rule: ComparedWith,
    ) -> Vec<Option<u32>> {
        let cells = Cells::from_rows(vec![ranking]);
        let threshold = degrees.to_radians().cos();
        let duplicates =
            Duplicates::find(rows, &cells, threshold, rule, &Communicator::solo(), &NoProgress).unwrap();
        (0..rows.len()).map(|row| duplicates.original(row).map(|nearest| nearest.row)).collect()
    }

    #[test]
    fn the_best_row_is_kept_and_chains_do_not_join() {
        let rows = circle(&[0.0, 4.0, 8.0, 90.0]);
        // The row at 8 degrees is too far from that at 0, and its neighbor at 4 is not kept.
        assert_eq!(originals(&rows, vec![0, 1, 2, 3], 5.0, ComparedWith::Kept), [None, Some(0), None, None]);
        // By SemDeDup's rule it is a duplicate of its neighbor.
        assert_eq!(
            originals(&rows, vec![0, 1, 2, 3], 5.0, ComparedWith::All),
            [None, Some(0), Some(1), None]
        );
        // If the row at 4 degrees is the best, both others are its duplicates.
        assert_eq!(
            originals(&rows, vec![1, 0, 2, 3], 5.0, ComparedWith::Kept),
            [Some(1), None, Some(1), None]
        );
    }

    fn noise(draw: Draw, i: usize) -> f32 {
        (draw.uniform(i as u64) * 2.0 - 1.0) as f32
    }

    /// Returns the similarity of rows `i` and `j` of `values`, `[n, d]`.
    fn similarity(values: &[f32], d: usize, i: usize, j: usize) -> f64 {
        let pairs = values[i * d..(i + 1) * d].iter().zip(&values[j * d..(j + 1) * d]);
        pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    }

    /// Rows of later blocks are compared with the kept rows of earlier blocks.
    #[test]
    fn comparison_in_blocks_equals_a_loop_over_all_pairs() {
        const D: usize = 16;
        let draw = Draw::new(0, "test");
        let mut values: Vec<f32> = Vec::new();
        for i in 0..3000 {
            // Every third row is nearly one of the rows before it, which may be a copy as well.
            let source = if i % 3 == 2 { Some(i * 7919 % i) } else { None };
            for c in 0..D {
                let noise = noise(draw, i * D + c);
                match source {
                    Some(j) => values.push(values[j * D + c] + 0.01 * noise),
                    None => values.push(noise),
                }
            }
        }
        let rows = FeatureRows::new(D, vec![Arc::new(values)], Metric::Cosine).unwrap();
        let cells = Cells::single(3000);
        let solo = Communicator::solo();
        let duplicates =
            Duplicates::find(&rows, &cells, 0.99, ComparedWith::Kept, &solo, &NoProgress).unwrap();
        let mut unit = vec![0.0; 3000 * D];
        rows.copy(0..3000, &mut unit);
        let mut kept: Vec<usize> = Vec::new();
        for i in 0..3000 {
            let similarities = kept.iter().map(|j| similarity(&unit, D, i, *j));
            let largest = similarities.fold(f64::NEG_INFINITY, f64::max);
            assert_eq!(duplicates.original(i).is_some(), largest >= 0.99, "row {i}");
            if let Some(original) = duplicates.original(i) {
                assert!((f64::from(original.similarity) - largest).abs() < 1e-6);
                assert!((similarity(&unit, D, i, original.row as usize) - largest).abs() < 1e-6);
            } else {
                kept.push(i);
            }
        }
        assert_eq!(duplicates.kept().len(), kept.len());
        assert!(kept.len() > 1900 && kept.len() < 2200, "{}", kept.len());
    }
}
