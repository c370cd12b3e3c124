//! Outliers: images that are unlike all others.

use kernels::rows::Rows;
use prep::parts::Work;
use ranks::communicator::Communicator;
use serde_json::json;

use super::cells::CellSettings;
use super::clusters::ClusterObserver;
use super::job::Job;
use super::lists::{Columns, six_digits};
use super::output::OutputFolder;
use crate::CurateError;
use crate::selection::mean_similarities;

/// Settings of a search for outliers.
#[derive(Debug, Clone)]
pub struct Outliers {
    /// Number of nearest neighbors over which the similarity of an image is averaged.
    pub n_neighbors: usize,
    /// Fraction of the images that are dropped, those with the lowest mean similarity.
    pub share: f64,
    /// Settings of cells.
    pub cells: CellSettings,
}

/// Outliers that were found.
pub struct FoundOutliers {
    /// Whether each image is kept.
    pub kept: Vec<bool>,
    /// Mean similarity of each image to its nearest neighbors.
    pub means: Vec<f32>,
    /// Rows, the most outlying first.
    pub order: Vec<usize>,
    /// Number of images that are dropped.
    pub n_outliers: usize,
}

impl Outliers {
    /// Returns the job of the search.
    pub fn job(&self) -> Job {
        let settings = json!({ "neighbors": self.n_neighbors, "share": self.share.to_string(),
            "cells": self.cells.identity() });
        Job { verb: "outliers", settings, work: Work::Whole }
    }

    /// Finds the outliers of the images of `output`. All ranks call it.
    ///
    /// # Errors
    /// [`CurateError`] if cells cannot be computed, or ranks cannot communicate.
    pub fn run(
        &self,
        output: &OutputFolder<'_>,
        ranks: &Communicator,
        observer: &dyn ClusterObserver,
    ) -> Result<FoundOutliers, CurateError> {
        let rows = &output.input.rows;
        let n = rows.len();
        let cells = self.cells.cells(rows, output.folder(), ranks, observer)?;
        let means = mean_similarities(rows, &cells, self.n_neighbors, ranks, observer)?;
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|a, b| means[*a].total_cmp(&means[*b]).then(a.cmp(b)));
        let n_outliers = (n as f64 * self.share).round() as usize;
        let mut kept = vec![true; n];
        for row in &order[..n_outliers] {
            kept[*row] = false;
        }
        Ok(FoundOutliers { kept, means, order, n_outliers })
    }
}

impl FoundOutliers {
    /// Returns the lowest, the median and the highest mean similarity.
    pub fn range(&self) -> [f32; 3] {
        let last = self.order.len() - 1;
        [0, (last as f64 * 0.5) as usize, last].map(|position| self.means[self.order[position]])
    }

    /// Returns the columns of a row of the list.
    pub fn columns(&self, row: usize) -> Columns {
        vec![("mean_similarity", six_digits(self.means[row]))]
    }
}
