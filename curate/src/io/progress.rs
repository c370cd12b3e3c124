//! Progress of clustering that saves centers, from which a later call continues.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pipeline::Progress;

use super::saved::save_centers;
use crate::ClusterProgress;
use crate::clusters::Centers;

/// Shortest time between two saves of an iteration of k-means.
const SAVE_EVERY: Duration = Duration::from_secs(30);

/// Progress of clustering, and the file to which centers are saved.
pub(super) struct SavedProgress<'a> {
    progress: &'a dyn Progress,
    /// File of the centers; `None` on a rank that does not save.
    path: Option<PathBuf>,
    /// Width of the centers.
    width: usize,
    last: Mutex<LastSave>,
}

/// Last save.
struct LastSave {
    at: Instant,
    /// Number of times that the centers had been computed again.
    n_resamplings: usize,
}

impl<'a> SavedProgress<'a> {
    /// Passes `progress` on, and saves centers of this width to `path`, if given.
    pub(super) fn new(progress: &'a dyn Progress, path: Option<PathBuf>, width: usize) -> Self {
        let last = LastSave { at: Instant::now(), n_resamplings: 0 };
        Self { progress, path, width, last: Mutex::new(last) }
    }
}

impl Progress for SavedProgress<'_> {
    fn begin(&self, stage: &str, n: u64) {
        self.progress.begin(stage, n);
    }

    fn advance(&self, n: u64) {
        self.progress.advance(n);
    }
}

impl ClusterProgress for SavedProgress<'_> {
    fn save(&self, centers: &Centers) {
        let Some(path) = &self.path else { return };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let n_resamplings = centers.n_resamplings;
        if last.at.elapsed() < SAVE_EVERY && n_resamplings == last.n_resamplings {
            return;
        }
        *last = LastSave { at: Instant::now(), n_resamplings };
        if let Err(error) = save_centers(path, centers, self.width) {
            tracing::warn!("could not save centers to {}: {error}", path.display());
        }
    }
}
