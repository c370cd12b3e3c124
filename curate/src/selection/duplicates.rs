//! Near-duplicates by cosine similarity, in cells (SemDeDup, Abbas et al. 2023) or among all rows.
//!
//! ```text
//! rows from the best to the worst: row i is a duplicate of the most similar row j of a rule, if x_i · x_j >= threshold
//! ```
//!
//! By the first rule row j is one that is kept, so that a chain of similar images does not join
//! ones that are far apart; by SemDeDup's own it is any better row, so that more rows go. Of rows
//! with equal similarity, the better one is named.

use std::collections::HashMap;

use kernels::ops::gemm::{Mat, gemm};
use kernels::rows::{Rows, nearest_rows};
use ranks::communicator::Communicator;
use rayon::prelude::*;

use super::cells::Cells;
use crate::rows::SelectedRows;
use crate::{CurateError, Progress, Silent};

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
    /// Similarity from which on a row is a duplicate.
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
        progress.begins("near-duplicates", rows.len() as u64);
        let topology = ranks.topology();
        let mut nearest = vec![None; rows.len()];
        if let [rows_of_cell] = ranking.rows() {
            let found = in_cell(rows, rows_of_cell, threshold, compared_with, ranks, progress)?;
            rows_of_cell.iter().zip(found).for_each(|(row, found)| nearest[*row as usize] = found);
            return Ok(Self { threshold, nearest });
        }
        let own: Vec<&Vec<u32>> =
            ranking.rows().iter().skip(topology.rank).step_by(topology.world_size).collect();
        let done: Vec<Vec<Option<NearestKept>>> = own
            .par_iter()
            .map(|cell| {
                let found = in_cell(rows, cell, threshold, compared_with, &Communicator::solo(), &Silent);
                progress.advances(cell.len() as u64);
                found
            })
            .collect::<Result<_, _>>()?;
        let mut words = Vec::new();
        for (cell, found) in own.iter().zip(&done) {
            for (row, found) in cell.iter().zip(found) {
                if let Some(found) = found {
                    words.extend([*row, found.row, found.similarity.to_bits()]);
                }
            }
        }
        for part in ranks.gather_bytes("near-duplicates", bytemuck::cast_slice(&words).to_vec())? {
            let words: Vec<u32> = bytemuck::pod_collect_to_vec(&part);
            for triple in words.chunks_exact(3) {
                let found = NearestKept { row: triple[1], similarity: f32::from_bits(triple[2]) };
                nearest[triple[0] as usize] = Some(found);
            }
        }
        Ok(Self { threshold, nearest })
    }

    /// Returns the row that row `i` duplicates, if it is a duplicate.
    pub fn original(&self, i: usize) -> Option<NearestKept> {
        self.nearest[i].filter(|nearest| nearest.similarity >= self.threshold)
    }

    /// Returns the rows that are kept.
    pub fn kept(&self) -> Vec<u32> {
        (0..self.nearest.len()).filter(|row| self.original(*row).is_none()).map(|row| row as u32).collect()
    }
}

/// Compares the rows of one cell, the best first; ranks divide the kept rows among themselves.
fn in_cell(
    rows: &dyn Rows,
    cell: &[u32],
    threshold: f32,
    compared_with: ComparedWith,
    ranks: &Communicator,
    progress: &dyn Progress,
) -> Result<Vec<Option<NearestKept>>, CurateError> {
    let topology = ranks.topology();
    // The rows that later ones are compared with.
    let mut kept: Vec<u32> = Vec::new();
    let mut found = Vec::with_capacity(cell.len());
    for block in cell.chunks(BLOCK) {
        let queries = SelectedRows::new(rows, block);
        let own: Vec<u32> =
            kept.chunks(BLOCK).skip(topology.rank).step_by(topology.world_size).flatten().copied().collect();
        let candidates = SelectedRows::new(rows, &own);
        let before = nearest_rows(&candidates, &queries, 1, false);
        let mut before: Vec<Option<NearestKept>> = before
            .iter()
            .map(|near| {
                near.first()
                    .map(|(i, similarity)| NearestKept { row: own[*i as usize], similarity: *similarity })
            })
            .collect();
        if topology.world_size > 1 {
            before = best_of_ranks(&before, &kept, ranks)?;
        }
        let within = similarities(&queries);
        let mut is_kept = vec![false; block.len()];
        for (i, before) in before.into_iter().enumerate() {
            let mut nearest = before;
            for j in (0..i).filter(|j| is_kept[*j]) {
                let similarity = within[i * block.len() + j];
                if nearest.is_none_or(|nearest| similarity > nearest.similarity) {
                    nearest = Some(NearestKept { row: block[j], similarity });
                }
            }
            is_kept[i] = compared_with == ComparedWith::All
                || nearest.is_none_or(|nearest| nearest.similarity < threshold);
            found.push(nearest);
        }
        kept.extend(block.iter().zip(&is_kept).filter(|(_, is_kept)| **is_kept).map(|(row, _)| *row));
        progress.advances(block.len() as u64);
    }
    Ok(found)
}

/// Returns the products of all pairs of `rows`, `[n, n]`.
fn similarities(rows: &dyn Rows) -> Vec<f32> {
    let n = rows.len();
    let d = rows.width();
    let mut values = vec![0.0; n * d];
    rows.copy(0..n, &mut values);
    let mut products = vec![0.0; n * n];
    let matrix = Mat::rows(&values, d);
    gemm([n, d, n], 1.0, matrix, matrix.t(), 0.0, &mut products, n);
    products
}

/// Returns the most similar of the rows that the ranks have found; of equal ones, the first in
/// `kept`.
fn best_of_ranks(
    own: &[Option<NearestKept>],
    kept: &[u32],
    ranks: &Communicator,
) -> Result<Vec<Option<NearestKept>>, CurateError> {
    let words: Vec<u32> = own
        .iter()
        .flat_map(|found| found.map_or([u32::MAX, 0], |found| [found.row, found.similarity.to_bits()]))
        .collect();
    let parts = ranks.gather_bytes("kept rows", bytemuck::cast_slice(&words).to_vec())?;
    let place: HashMap<u32, usize> = kept.iter().copied().zip(0..).collect();
    let mut best: Vec<Option<NearestKept>> = vec![None; own.len()];
    for part in parts {
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(&part);
        for (best, pair) in best.iter_mut().zip(words.chunks_exact(2)) {
            let found = NearestKept { row: pair[0], similarity: f32::from_bits(pair[1]) };
            if found.row != u32::MAX
                && best.is_none_or(|best| {
                    let order = found.similarity.total_cmp(&best.similarity);
                    order.then(place[&best.row].cmp(&place[&found.row])).is_gt()
                })
            {
                *best = Some(found);
            }
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{FeatureRows, Metric};

    /// Rows on a circle, by angle in degrees.
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
        let found =
            Duplicates::find(rows, &cells, degrees.to_radians().cos(), rule, &Communicator::solo(), &Silent);
        let found = found.unwrap();
        (0..rows.len()).map(|row| found.original(row).map(|nearest| nearest.row)).collect()
    }

    #[test]
    fn the_best_row_is_kept_and_chains_do_not_join() {
        let rows = circle(&[0.0, 4.0, 8.0, 90.0]);
        // 8 is too far from 0, and 4, its neighbor, is not kept.
        assert_eq!(originals(&rows, vec![0, 1, 2, 3], 5.0, ComparedWith::Kept), [None, Some(0), None, None]);
        // SemDeDup's rule drops it for its neighbor.
        assert_eq!(
            originals(&rows, vec![0, 1, 2, 3], 5.0, ComparedWith::All),
            [None, Some(0), Some(1), None]
        );
        // With 4 as the best, both others are its duplicates.
        assert_eq!(
            originals(&rows, vec![1, 0, 2, 3], 5.0, ComparedWith::Kept),
            [Some(1), None, Some(1), None]
        );
    }

    /// Rows of later blocks are compared with kept ones of earlier blocks, as a loop over all pairs
    /// does.
    #[test]
    fn blocks_give_what_a_loop_over_pairs_gives() {
        const D: usize = 16;
        let draw = crate::draw::Draw::new(0, "test");
        let noise = |i: usize| (draw.uniform(i as u64) * 2.0 - 1.0) as f32;
        let mut values: Vec<f32> = Vec::new();
        for i in 0..3000 {
            // Every third row is nearly one of the rows before it, which may be a copy as well.
            let source = if i % 3 == 2 { Some(i * 7919 % i) } else { None };
            for c in 0..D {
                let value = source.map_or(noise(i * D + c), |j| values[j * D + c] + 0.01 * noise(i * D + c));
                values.push(value);
            }
        }
        let rows = FeatureRows::new(D, vec![Arc::new(values)], Metric::Cosine).unwrap();
        let cells = Cells::one(3000);
        let found = Duplicates::find(&rows, &cells, 0.99, ComparedWith::Kept, &Communicator::solo(), &Silent)
            .unwrap();
        let mut unit = vec![0.0; 3000 * D];
        rows.copy(0..3000, &mut unit);
        let similarity = |i: usize, j: usize| -> f64 {
            (0..D).map(|c| f64::from(unit[i * D + c]) * f64::from(unit[j * D + c])).sum()
        };
        let mut kept: Vec<usize> = Vec::new();
        for i in 0..3000 {
            let most = kept.iter().map(|j| similarity(i, *j)).fold(f64::NEG_INFINITY, f64::max);
            assert_eq!(found.original(i).is_some(), most >= 0.99, "row {i}");
            if let Some(original) = found.original(i) {
                assert!((f64::from(original.similarity) - most).abs() < 1e-6);
                assert!((similarity(i, original.row as usize) - most).abs() < 1e-6);
            } else {
                kept.push(i);
            }
        }
        assert_eq!(found.kept().len(), kept.len());
        assert!(kept.len() > 1900 && kept.len() < 2200, "{}", kept.len());
    }
}
