//! Rows of features, in memory or mapped from files.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use kernels::rows::{CANDIDATE_BLOCK_ROWS, NearestCenter, QUERY_BLOCK_ROWS, Rows, scale_to_unit_length};
use rayon::prelude::*;
use xxhash_rust::xxh3::Xxh3;

use crate::CurateError;

/// Values of consecutive rows, in memory or mapped from a file.
pub type Numbers = Arc<dyn AsRef<[f32]> + Send + Sync>;

/// Distance by which rows are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metric {
    /// Rows are scaled to unit length, so that the squared distance is 2 - 2 · cosine similarity.
    Cosine,
    /// Rows are compared as they are.
    Euclidean,
}

/// Rows of features, `[n, width]`, in one or several parts.
#[derive(Clone)]
pub struct FeatureRows {
    parts: Vec<Numbers>,
    /// Number of rows before each part, and of all.
    starts: Vec<usize>,
    width: usize,
    metric: Metric,
    /// Hash of the rows, computed when it is first used.
    fingerprint: Arc<OnceLock<u64>>,
}

impl FeatureRows {
    /// Returns the rows of `parts`, one after the other.
    ///
    /// # Errors
    /// [`CurateError::Shape`].
    pub fn new(width: usize, parts: Vec<Numbers>, metric: Metric) -> Result<Self, CurateError> {
        let mut starts = vec![0];
        for part in &parts {
            let n_numbers = (**part).as_ref().len();
            if width == 0 || !n_numbers.is_multiple_of(width) {
                return Err(CurateError::Shape { n_numbers, width });
            }
            starts.push(starts[starts.len() - 1] + n_numbers / width);
        }
        Ok(Self { parts, starts, width, metric, fingerprint: Arc::default() })
    }

    /// Returns a hash of the number and width of the rows and of all their values: equal however
    /// the rows are split into parts. The metric is left out.
    pub fn fingerprint(&self) -> u64 {
        *self.fingerprint.get_or_init(|| self.compute_fingerprint())
    }

    fn compute_fingerprint(&self) -> u64 {
        let mut hash = Xxh3::new();
        hash.update(&(self.len() as u64).to_le_bytes());
        hash.update(&(self.width as u64).to_le_bytes());
        for part in &self.parts {
            hash.update(bytemuck::cast_slice((**part).as_ref()));
        }
        hash.digest()
    }

    /// Returns the distance by which rows are compared.
    pub fn metric(&self) -> Metric {
        self.metric
    }

    /// Returns the largest absolute value in rows `range`: 1 for [`Metric::Cosine`], which compares
    /// rows of unit length.
    ///
    /// # Errors
    /// [`CurateError::NotFinite`] for the first row whose values or squared length are not finite.
    pub fn largest(&self, range: Range<usize>) -> Result<f32, CurateError> {
        let partial: Vec<Result<f32, usize>> = range
            .into_par_iter()
            .fold(|| Ok(0.0f32), |largest, row| larger_or_error(largest, self.largest_in_row(row)))
            .collect();
        match partial.into_iter().fold(Ok(0.0f32), larger_or_error) {
            Err(row) => Err(CurateError::NotFinite { row }),
            Ok(_) if self.metric == Metric::Cosine => Ok(1.0),
            Ok(largest) => Ok(largest),
        }
    }

    /// Returns the largest absolute value of `row`, or `row` if its squared length is not finite:
    /// distances are sums of squares.
    fn largest_in_row(&self, row: usize) -> Result<f32, usize> {
        let values = self.stored_row(row);
        let squared_length: f32 = values.iter().map(|v| v * v).sum();
        if !squared_length.is_finite() {
            return Err(row);
        }
        Ok(values.iter().fold(0.0, |largest: f32, v| largest.max(v.abs())))
    }

    /// Returns row `i` as it is stored.
    fn stored_row(&self, i: usize) -> &[f32] {
        let part = self.starts.partition_point(|start| *start <= i) - 1;
        let start = (i - self.starts[part]) * self.width;
        &(*self.parts[part]).as_ref()[start..start + self.width]
    }
}

/// Returns the larger value, or the error of the lower row.
fn larger_or_error(a: Result<f32, usize>, b: Result<f32, usize>) -> Result<f32, usize> {
    match (a, b) {
        (Ok(a), Ok(b)) => Ok(a.max(b)),
        (Err(a), Err(b)) => Err(a.min(b)),
        (Err(row), _) | (_, Err(row)) => Err(row),
    }
}

impl Rows for FeatureRows {
    fn len(&self) -> usize {
        self.starts[self.parts.len()]
    }

    fn width(&self) -> usize {
        self.width
    }

    fn copy(&self, range: Range<usize>, out: &mut [f32]) {
        for (i, out) in range.zip(out.chunks_exact_mut(self.width)) {
            out.copy_from_slice(self.stored_row(i));
            if self.metric == Metric::Cosine {
                scale_to_unit_length(out);
            }
        }
    }
}

/// Some of the rows of a set.
pub struct SelectedRows<'a> {
    rows: &'a dyn Rows,
    indices: &'a [u32],
}

impl<'a> SelectedRows<'a> {
    /// Returns the rows with these indices, in this order.
    pub fn new(rows: &'a dyn Rows, indices: &'a [u32]) -> Self {
        Self { rows, indices }
    }
}

impl Rows for SelectedRows<'_> {
    fn len(&self) -> usize {
        self.indices.len()
    }

    fn width(&self) -> usize {
        self.rows.width()
    }

    fn copy(&self, range: Range<usize>, out: &mut [f32]) {
        for (index, out) in self.indices[range].iter().zip(out.chunks_exact_mut(self.rows.width())) {
            self.rows.copy(*index as usize..*index as usize + 1, out);
        }
    }
}

// Parts of rows are also the queries of a comparison.
const _: () = assert!(NearestCenter::BLOCK_ROWS.is_multiple_of(QUERY_BLOCK_ROWS));
const _: () = assert!(CANDIDATE_BLOCK_ROWS.is_multiple_of(QUERY_BLOCK_ROWS));

/// Returns the rows, of `n`, that rank `rank` of `world_size` compares: whole blocks, so that the
/// bits of distances are the same on any number of ranks.
pub fn part_of_rank(n: usize, rank: usize, world_size: usize) -> Range<usize> {
    part_in_blocks(n, NearestCenter::BLOCK_ROWS, rank, world_size)
}

/// Returns the rows, of `n`, that rank `rank` of `world_size` compares, in whole blocks of
/// `n_block`.
pub(crate) fn part_in_blocks(n: usize, n_block: usize, rank: usize, world_size: usize) -> Range<usize> {
    let n_blocks = n.div_ceil(n_block);
    let start = (rank * n_blocks / world_size * n_block).min(n);
    let end = ((rank + 1) * n_blocks / world_size * n_block).min(n);
    start..end
}
