//! Rows of features, in memory or in a memory-mapped file.

use std::sync::Arc;

use super::columns::Columns;
use super::mapped::Mapped;

/// Rows of features and their images.
#[derive(Debug, Clone)]
pub struct Table {
    /// Columns of a row.
    pub columns: Columns,
    /// Index of each row's image in its set. An image that cannot be decoded has no row.
    pub images: Vec<u32>,
    rows: Rows,
}

#[derive(Debug, Clone)]
enum Rows {
    Memory(Arc<Vec<f32>>),
    File(Arc<Mapped>),
}

impl Table {
    /// Returns a table of rows in memory, `[n, width]`.
    pub fn new(columns: Columns, images: Vec<u32>, rows: Vec<f32>) -> Self {
        Self { columns, images, rows: Rows::Memory(Arc::new(rows)) }
    }

    /// Returns a table of rows in a memory-mapped file.
    pub(crate) fn from_mapped(columns: Columns, images: Vec<u32>, rows: Mapped) -> Self {
        Self { columns, images, rows: Rows::File(Arc::new(rows)) }
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.images.len()
    }

    /// Returns whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.images.is_empty()
    }

    /// Returns all rows, `[n, width]`.
    pub fn rows(&self) -> &[f32] {
        match &self.rows {
            Rows::Memory(rows) => rows,
            Rows::File(rows) => rows.values(),
        }
    }

    /// Returns whether there are several rows and all are the same.
    pub fn has_equal_rows(&self) -> bool {
        self.len() > 1 && (1..self.len()).all(|i| self.row(i) == self.row(0))
    }

    /// Returns row `i`.
    pub fn row(&self, i: usize) -> &[f32] {
        let width = self.columns.width();
        &self.rows()[i * width..(i + 1) * width]
    }
}
