//! Cells within which images are compared.

use std::path::Path;

use kernels::rows::Rows;
use ranks::communicator::Communicator;
use serde_json::{Value, json};

use super::clusters::{ClusterObserver, KMeansSettings, cluster};
use crate::clusters::{HierarchySettings, LevelSettings, Resampling};
use crate::selection::Cells;
use crate::{CurateError, FeatureRows};

/// Largest number of images of which all pairs are compared by default.
const MAX_WHOLE: usize = 50_000;

/// Mean number of images of a cell by default.
const ROWS_PER_CELL: usize = 1000;

/// Settings of cells.
#[derive(Debug, Clone)]
pub struct CellSettings {
    /// Number of cells, of which one compares all pairs; by default one for up to 50,000 images,
    /// otherwise one per 1,000 images.
    pub n_cells: Option<u32>,
    /// Settings of the k-means that makes the cells.
    pub kmeans: KMeansSettings,
}

impl CellSettings {
    /// Returns the cells of `rows`, whose clusters are saved in `folder`. All ranks call it.
    pub(super) fn cells(
        &self,
        rows: &FeatureRows,
        folder: &Path,
        ranks: &Communicator,
        observer: &dyn ClusterObserver,
    ) -> Result<Cells, CurateError> {
        let n = rows.len();
        let n_cells = match self.n_cells {
            Some(n_cells) => n_cells as usize,
            None if n <= MAX_WHOLE => 1,
            None => n / ROWS_PER_CELL,
        };
        if n_cells == 1 {
            return Ok(Cells::single(n));
        }
        let level = LevelSettings {
            n_clusters: n_cells,
            n_splits: 1,
            resampling: Resampling { n_times: 0, n_rows: 1 },
        };
        let settings = HierarchySettings {
            levels: vec![level],
            n_iterations: self.kmeans.n_iterations,
            seed: self.kmeans.seed,
        };
        let clusters = cluster(&settings, rows, folder, self.kmeans.memory_bytes, ranks, observer)?;
        Ok(Cells::from_tree(&clusters.tree))
    }

    /// Returns the settings as part of the identity of a job.
    pub(super) fn identity(&self) -> Value {
        json!([self.n_cells, self.kmeans.n_iterations, self.kmeans.seed])
    }
}
