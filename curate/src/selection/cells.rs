//! Cells: groups of rows within which rows are compared, so that not every pair has to be.

use crate::clusters::Tree;

/// Rows of each cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cells(Vec<Vec<u32>>);

impl Cells {
    /// Returns one cell with `n` rows: every pair is compared.
    pub fn one(n: usize) -> Self {
        Self(vec![(0..n as u32).collect()])
    }

    /// Returns the clusters of the lowest level as cells.
    pub fn of_clusters(tree: &Tree) -> Self {
        Self(tree.children(0))
    }

    /// Returns cells whose rows are listed, in their order.
    #[cfg(test)]
    pub(crate) fn from_rows(cells: Vec<Vec<u32>>) -> Self {
        Self(cells)
    }

    /// Returns the cells with the rows of each in the order of `rank`, the smallest first; of equal
    /// ones, the row with the lower index.
    pub fn ranked<K: Ord>(mut self, rank: impl Fn(u32) -> K) -> Self {
        for rows in &mut self.0 {
            rows.sort_by_key(|row| (rank(*row), *row));
        }
        self
    }

    /// Returns the rows of each cell.
    pub fn rows(&self) -> &[Vec<u32>] {
        &self.0
    }
}
