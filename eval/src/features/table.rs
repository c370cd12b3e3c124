//! Rows of features: in memory, or in a file that is mapped.

use std::sync::Arc;

use super::columns::Columns;
use super::mapped::Mapped;

/// Rows of features and the images that they belong to.
#[derive(Debug, Clone)]
pub struct Table {
    /// What a row holds.
    pub columns: Columns,
    /// Number of each row's image in its set. An image that cannot be decoded has no row.
    pub images: Vec<u32>,
    rows: Rows,
}

#[derive(Debug, Clone)]
enum Rows {
    Memory(Arc<Vec<f32>>),
    File(Arc<Mapped>),
}

impl Table {
    /// Rows in memory, `[n, width]`.
    pub fn new(columns: Columns, images: Vec<u32>, rows: Vec<f32>) -> Self {
        Self { columns, images, rows: Rows::Memory(Arc::new(rows)) }
    }

    /// Rows of a file.
    pub(crate) fn mapped(columns: Columns, images: Vec<u32>, rows: Mapped) -> Self {
        Self { columns, images, rows: Rows::File(Arc::new(rows)) }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.images.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.images.is_empty()
    }

    /// All rows, `[n, width]`.
    pub fn rows(&self) -> &[f32] {
        match &self.rows {
            Rows::Memory(rows) => rows,
            Rows::File(rows) => rows.values(),
        }
    }

    /// Row `i`.
    pub fn row(&self, i: usize) -> &[f32] {
        let width = self.columns.width();
        &self.rows()[i * width..(i + 1) * width]
    }
}
