//! A table of positions, resampled for other grids.

use std::collections::HashMap;
use std::sync::Mutex;

use burn_tensor::{Tensor, TensorData};
use kernels::ops::matmul;

use crate::interpolation::{Resampling, matrix};

/// A table of positions, of which a unit has the values: rows of tokens that have no cell, then
/// those of the cells of a grid.
pub(crate) struct PositionTable {
    /// Number of rows before those of cells.
    pub n_before: usize,
    /// Cells along a side of the grid that the table is made for.
    pub side: usize,
    /// Rule for resampling the table.
    pub resampling: Resampling,
    /// Interpolation matrices by grid, computed when needed; a run has a few grids.
    pub matrices: Mutex<HashMap<[usize; 2], TensorData>>,
}

impl PositionTable {
    /// Creates a table for grids of `side`×`side` cells.
    pub(crate) fn new(n_before: usize, side: usize, resampling: Resampling) -> Self {
        Self { n_before, side, resampling, matrices: Mutex::default() }
    }

    /// Returns the number of rows of the table.
    pub(crate) fn n_rows(&self) -> usize {
        self.n_before + self.side * self.side
    }

    /// Returns the rows for `grid`, `[n_before + N, D]`, given the values of the table.
    pub(crate) fn rows(&self, values: Tensor<2>, grid: [usize; 2]) -> Tensor<2> {
        if grid == [self.side; 2] {
            return values;
        }
        let [n, d] = values.dims();
        let cells = values.clone().slice([self.n_before..n, 0..d]);
        let data = {
            // The map stays valid if a holder panics: an entry is inserted whole.
            let mut cache = self.matrices.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            cache
                .entry(grid)
                .or_insert_with(|| {
                    let matrix = matrix(self.side, grid, self.resampling);
                    TensorData::new(matrix, [grid[0] * grid[1], n - self.n_before])
                })
                .clone()
        };
        let matrix = Tensor::<2>::from_data(data, &cells.device()).cast(cells.dtype());
        let cells = matmul(matrix, cells);
        if self.n_before == 0 {
            return cells;
        }
        Tensor::cat(vec![values.slice([0..self.n_before, 0..d]), cells], 0)
    }
}
