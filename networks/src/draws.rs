//! Random numbers of a unit in training: dropped branches, and changes of coordinates.

use std::ops::Range;

use kernels::ops::MIN_SKIPPED_SHARE;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Rules by which random numbers of a unit are drawn in training.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DrawRules {
    /// Dropped branches.
    pub drop: DropRule,
    /// Changes of the coordinates of cells.
    pub coordinates: CoordinateRule,
}

/// Rule by which a unit's branches are dropped for some of the views in training (stochastic depth,
/// Huang et al. 2016).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DropRule {
    /// Share of the views for which a branch is dropped.
    pub share: f32,
    /// Number of these views.
    pub count: DropCount,
}

impl DropRule {
    /// Returns the expected share of the views for which a branch is computed, in slices of many
    /// views: 1 unless a pass `drops` branches. If all views of a slice are dropped, the branch is
    /// nevertheless computed for one of them.
    pub fn computed_share(&self, drops: bool) -> f64 {
        let dropped = f64::from(self.share);
        if drops && dropped >= MIN_SKIPPED_SHARE { 1.0 - dropped } else { 1.0 }
    }
}

/// Number of the views for which a branch is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DropCount {
    /// Random: every view is drawn independently.
    #[default]
    Random,
    /// Fixed: the same in each step, among all views of a size in the batch; DINOv2 and DINOv3
    /// count the views of a GPU.
    Exact,
}

/// Rule by which coordinates of cells are changed in training.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CoordinateRule {
    /// Largest shift of an axis, in units of half the grid.
    pub shift: Option<f32>,
    /// Largest factor of an axis, drawn for each axis.
    pub jitter: Option<f32>,
    /// Largest factor of both axes.
    pub rescale: Option<f32>,
}

/// Change of the coordinates of cells: `(c + shift) · factor`, by axis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CoordinateDraw {
    /// Shift of rows and columns.
    pub shift: [f32; 2],
    /// Factor of rows and columns.
    pub factor: [f32; 2],
}

impl Default for CoordinateDraw {
    fn default() -> Self {
        Self { shift: [0.0; 2], factor: [1.0; 2] }
    }
}

/// Random numbers drawn for one unit in one step.
#[derive(Debug, Clone, Default)]
pub struct Draws {
    /// Changes of coordinates, by group; empty when nothing is changed.
    pub coordinates: Vec<CoordinateDraw>,
    /// Factor of each sequence, by group and branch: 0, or the number of all sequences divided by
    /// the expected number of those that keep the branch. Empty when nothing is dropped.
    pub drop_path: Vec<[Vec<f32>; 2]>,
}

impl Draws {
    /// Returns the factors of a branch, one for each sequence of the groups of a stream, which have
    /// these indices; `None` when nothing is dropped.
    pub fn factors(&self, groups: Range<usize>, branch: usize) -> Option<Vec<f32>> {
        let branches = self.drop_path.get(groups)?;
        Some(branches.iter().flat_map(|branches| branches[branch].iter().copied()).collect())
    }
}
