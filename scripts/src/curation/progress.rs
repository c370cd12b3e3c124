//! Progress of curation as bars.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use curate::Progress;

use super::saved::save_centers;
use crate::evaluation::flags::StageBar;

/// Least time between two saves of k-means.
const SAVE_EVERY: Duration = Duration::from_secs(30);

/// Bars, one for each stage, and the file that k-means saves its centers to.
pub(crate) struct Bars {
    bar: StageBar,
    centers: Option<PathBuf>,
    width: usize,
    saved: Mutex<Instant>,
}

impl Bars {
    /// Creates the bars. With a path, k-means saves its centers, of this width, there.
    pub(crate) fn new(centers: Option<PathBuf>, width: usize) -> Self {
        Self { bar: StageBar::new(), centers, width, saved: Mutex::new(Instant::now()) }
    }
}

impl Progress for Bars {
    fn begins(&self, stage: &str, n_rows: u64) {
        eval::Progress::begins(&self.bar, stage, n_rows as usize);
    }

    fn advances(&self, n_rows: u64) {
        eval::Progress::seen(&self.bar, n_rows as usize);
    }

    fn save(&self, centers: &[f32], n_iterations: usize) -> std::io::Result<()> {
        let Some(path) = &self.centers else { return Ok(()) };
        let mut saved = self.saved.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if saved.elapsed() < SAVE_EVERY {
            return Ok(());
        }
        *saved = Instant::now();
        save_centers(path, centers, self.width, n_iterations)
    }
}
