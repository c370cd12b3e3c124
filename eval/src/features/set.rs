//! Input of a protocol: some columns of some rows of a table, with their classes.

use std::ops::Range;
use std::sync::Arc;

use kernels::rows::scale_to_unit_length;

use super::columns::Columns;
use super::table::Table;

/// Rows of features with their classes. Cheap to clone: the numbers are shared.
#[derive(Debug, Clone)]
pub struct FeatureSet {
    /// Class of each row.
    pub labels: Vec<u32>,
    table: Arc<Table>,
    /// Index of each row in the table.
    rows: Vec<u32>,
    columns: Range<usize>,
}

impl FeatureSet {
    /// Returns the rows of `table` whose images have a class, as returned by `label`.
    pub fn from_table(table: Arc<Table>, label: impl Fn(usize) -> Option<u32>) -> Self {
        let mut rows = Vec::new();
        let mut labels = Vec::new();
        for (row, image) in (0u32..).zip(&table.images) {
            if let Some(label) = label(*image as usize) {
                rows.push(row);
                labels.push(label);
            }
        }
        let columns = 0..table.columns.width();
        Self { labels, table, rows, columns }
    }

    /// Returns an empty set.
    pub fn empty() -> Self {
        Self::from_rows(0, Vec::new(), Vec::new())
    }

    /// Returns a set of rows of one level, `[n, width]`.
    pub fn from_rows(width: usize, rows: Vec<f32>, labels: Vec<u32>) -> Self {
        let images = (0..labels.len() as u32).collect();
        let table = Table::new(Columns { levels: vec![width], average: 0 }, images, rows);
        Self::from_table(Arc::new(table), |image| Some(labels[image]))
    }

    /// Returns the layout of the table's columns.
    pub fn layout(&self) -> &Columns {
        &self.table.columns
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the number of columns.
    pub fn width(&self) -> usize {
        self.columns.len()
    }

    /// Returns row `i`.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.table.row(self.rows[i] as usize)[self.columns.clone()]
    }

    /// Returns the index of row `i`'s image in its set.
    pub fn image(&self, i: usize) -> usize {
        self.table.images[self.rows[i] as usize] as usize
    }

    /// Returns the same rows with only `columns` of the table.
    pub fn columns(&self, columns: Range<usize>) -> Self {
        Self { columns, ..self.clone() }
    }

    /// Returns the rows with these indices.
    pub fn select(&self, rows: impl Iterator<Item = usize>) -> Self {
        let (rows, labels) = rows.map(|i| (self.rows[i], self.labels[i])).unzip();
        Self { labels, rows, table: Arc::clone(&self.table), columns: self.columns.clone() }
    }

    /// Writes rows `range`, each scaled to unit length, into `out`, `[n, width]`.
    pub fn copy_normalized(&self, range: Range<usize>, out: &mut [f32]) {
        for (i, out) in range.zip(out.chunks_exact_mut(self.width())) {
            out.copy_from_slice(self.row(i));
            scale_to_unit_length(out);
        }
    }
}
