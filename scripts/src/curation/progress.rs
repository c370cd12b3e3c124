//! Progress of curation as bars.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use curate::Progress;
use curate::clusters::Centers;

use super::saved::save_centers;
use crate::console::say;
use crate::evaluation::flags::StageBar;

/// Least time between two saves of an iteration of k-means.
const SAVE_EVERY: Duration = Duration::from_secs(30);

/// Bars, one for each stage, and the file that k-means saves its centers to.
pub(crate) struct Bars {
    bar: StageBar,
    centers: Option<PathBuf>,
    width: usize,
    saved: Mutex<Saved>,
}

/// Last save.
struct Saved {
    at: Instant,
    /// Number of times that the centers had been computed again.
    n_resamplings: usize,
}

impl Bars {
    /// Creates the bars. With a path, k-means saves its centers, of this width, there.
    pub(crate) fn new(centers: Option<PathBuf>, width: usize) -> Self {
        let saved = Saved { at: Instant::now(), n_resamplings: 0 };
        Self { bar: StageBar::new(), centers, width, saved: Mutex::new(saved) }
    }
}

impl Progress for Bars {
    fn begins(&self, stage: &str, n_rows: u64) {
        eval::Progress::begins(&self.bar, stage, n_rows as usize);
    }

    fn advances(&self, n_rows: u64) {
        eval::Progress::seen(&self.bar, n_rows as usize);
    }

    fn save(&self, centers: &Centers) {
        let Some(path) = &self.centers else { return };
        let mut saved = self.saved.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let n_resamplings = centers.n_resamplings;
        if saved.at.elapsed() < SAVE_EVERY && n_resamplings == saved.n_resamplings {
            return;
        }
        *saved = Saved { at: Instant::now(), n_resamplings };
        if let Err(error) = save_centers(path, centers, self.width) {
            say(format!("warning: centers are not saved, {}: {error}", path.display()));
        }
    }
}
