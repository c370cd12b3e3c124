//! Cells: groups of rows within which rows are compared, instead of all pairs.

use crate::clusters::Tree;

/// Rows of each cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cells(Vec<Vec<u32>>);

impl Cells {
    /// Creates a single cell of `n` rows: every pair is compared.
    pub fn single(n: usize) -> Self {
        Self(vec![(0..n as u32).collect()])
    }

    /// Creates a cell for each cluster of the lowest level.
    pub fn from_tree(tree: &Tree) -> Self {
        Self(tree.children(0))
    }

    /// Creates cells from their rows.
    #[cfg(test)]
    pub(crate) fn from_rows(cells: Vec<Vec<u32>>) -> Self {
        Self(cells)
    }

    /// Sorts the rows of each cell by `rank`, the smallest first, and by index where ranks are
    /// equal.
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
