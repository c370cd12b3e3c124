//! Progress of curation as bars.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use curate::ClusterProgress;
use curate::clusters::Centers;
use pipeline::Progress;
use ranks::communicator::Communicator;

use super::saved::save_centers;
use crate::console::say;
use crate::progress::StageBar;

/// Shortest time between two saves of an iteration of k-means.
const SAVE_EVERY: Duration = Duration::from_secs(30);

/// Bars of the first rank, one for each stage, and the file to which it saves centers.
pub(crate) struct Bars {
    /// The bars; `None` on other ranks.
    bar: Option<StageBar>,
    file: Option<CentersFile>,
    saved: Mutex<Saved>,
}

/// File of centers.
struct CentersFile {
    path: PathBuf,
    /// Width of the centers.
    width: usize,
}

/// Last save.
struct Saved {
    at: Instant,
    /// Number of times that the centers had been computed again.
    n_resamplings: usize,
}

impl Bars {
    /// Creates the bars.
    pub(crate) fn new(ranks: &Communicator) -> Self {
        let saved = Saved { at: Instant::now(), n_resamplings: 0 };
        let bar = (ranks.topology().rank == 0).then(StageBar::new);
        Self { bar, file: None, saved: Mutex::new(saved) }
    }

    /// Creates bars that save centers, of this width, to `path`.
    pub(crate) fn saving_to(path: PathBuf, width: usize, ranks: &Communicator) -> Self {
        let bars = Self::new(ranks);
        let file = bars.bar.is_some().then_some(CentersFile { path, width });
        Self { file, ..bars }
    }
}

impl Progress for Bars {
    fn begin(&self, stage: &str, n: u64) {
        if let Some(bar) = &self.bar {
            bar.begin(stage, n);
        }
    }

    fn advance(&self, n: u64) {
        if let Some(bar) = &self.bar {
            bar.advance(n);
        }
    }
}

impl ClusterProgress for Bars {
    fn save(&self, centers: &Centers) {
        let Some(CentersFile { path, width }) = &self.file else { return };
        let mut saved = self.saved.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let n_resamplings = centers.n_resamplings;
        if saved.at.elapsed() < SAVE_EVERY && n_resamplings == saved.n_resamplings {
            return;
        }
        *saved = Saved { at: Instant::now(), n_resamplings };
        if let Err(error) = save_centers(path, centers, *width) {
            say(format!("warning: could not save centers to {}: {error}", path.display()));
        }
    }
}
