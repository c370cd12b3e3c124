//! Progress of clustering, whose centers can be saved on the way.

use pipeline::{NoProgress, Progress};

use crate::centers::Centers;

/// Receiver of the progress of clustering.
pub trait ClusterProgress: Progress {
    /// Saves the centers of the lowest level after an iteration of k-means or after resampling, so
    /// that a later run can resume from them. The computation continues whether or not this
    /// succeeds. Only one rank may save.
    fn save(&self, centers: &Centers) {
        let _ = centers;
    }
}

impl ClusterProgress for NoProgress {}

/// Progress that saves nothing.
pub(crate) struct Unsaved<'a>(pub(crate) &'a dyn Progress);

impl Progress for Unsaved<'_> {
    fn begin(&self, stage: &str, n: u64) {
        self.0.begin(stage, n);
    }

    fn advance(&self, n: u64) {
        self.0.advance(n);
    }
}

impl ClusterProgress for Unsaved<'_> {}
