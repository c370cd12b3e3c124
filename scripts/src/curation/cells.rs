//! Cells within which images are compared.

use std::path::Path;

use curate::FeatureRows;
use curate::clusters::{HierarchySettings, LevelSettings, Resampling};
use curate::selection::Cells;
use kernels::rows::Rows;
use ranks::communicator::Communicator;
use serde_json::{Value, json};

use super::clusters::{self, KMeansFlags};

/// Largest number of images of which all pairs are compared by default.
const MAX_WHOLE: usize = 50_000;

/// Mean number of images of a cell by default.
const ROWS_PER_CELL: usize = 1000;

/// Flags of cells.
#[derive(clap::Args)]
pub(crate) struct CellFlags {
    /// Number of k-means cells; only images in the same cell are compared. With 1, all pairs are
    /// compared [default: 1 for up to 50,000 images, otherwise one per 1,000 images].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    cells: Option<u32>,
    #[command(flatten)]
    limits: KMeansFlags,
}

impl CellFlags {
    /// Returns the cells of `rows`. All ranks call it.
    pub(crate) fn cells(
        &self,
        rows: &FeatureRows,
        out: &Path,
        ranks: &Communicator,
    ) -> anyhow::Result<Cells> {
        let n = rows.len();
        let n_cells = match self.cells {
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
            n_iterations: self.limits.iterations,
            seed: self.limits.seed,
        };
        Ok(Cells::from_tree(&clusters::run(&settings, rows, out, &self.limits, ranks)?.tree))
    }

    /// Returns the settings as part of the identity of a job.
    pub(crate) fn identity(&self) -> Value {
        json!([self.cells, self.limits.iterations, self.limits.seed])
    }
}
