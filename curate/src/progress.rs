//! Reports of the progress of a long computation.

use crate::centers::Centers;

/// Receiver of progress.
pub trait Progress: Sync {
    /// Begins a stage of `n_rows` rows.
    fn begins(&self, stage: &str, n_rows: u64);

    /// Counts `n_rows` rows as done.
    fn advances(&self, n_rows: u64);

    /// Saves the centers of the lowest level after an iteration of k-means or after resampling, so
    /// that a later run can resume from them. The computation continues whether or not this
    /// succeeds. Only one rank may save.
    fn save(&self, centers: &Centers) {
        let _ = centers;
    }
}

/// Receiver that ignores progress.
pub struct Silent;

impl Progress for Silent {
    fn begins(&self, _: &str, _: u64) {}

    fn advances(&self, _: u64) {}
}

/// Progress that saves nothing.
pub(crate) struct Unsaved<'a>(pub(crate) &'a dyn Progress);

impl Progress for Unsaved<'_> {
    fn begins(&self, stage: &str, n_rows: u64) {
        self.0.begins(stage, n_rows);
    }

    fn advances(&self, n_rows: u64) {
        self.0.advances(n_rows);
    }
}
