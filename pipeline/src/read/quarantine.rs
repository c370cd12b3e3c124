//! The ledger of bad samples: one JSON line for each, and an error if their rate exceeds a limit.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::file::open_append;
use crate::{Dataset, PipelineError, SampleId};

/// Minimum number of samples from which the limit is computed: a rate over fewer means little.
const MIN_SAMPLES_FOR_RATE: u64 = 100;

/// Number of bad samples that no rate above zero forbids: chance brings as many into a hundred
/// samples of a good set.
const MIN_BAD_FOR_RATE: u64 = 3;

/// Bad samples of one run.
#[derive(Debug)]
pub struct Quarantine {
    path: PathBuf,
    max_rate: f64,
    n_seen: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    file: Option<File>,
    bad: HashSet<SampleId>,
    written: HashSet<(String, String)>,
}

/// A line of the ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LedgerRow {
    /// The shard.
    pub shard: String,
    /// The sample's key.
    pub key: String,
    /// Offset of the sample's first member in the shard, in bytes.
    pub offset_bytes: u64,
    /// Reason why it cannot be used.
    pub reason: String,
}

impl Quarantine {
    /// Opens the ledger at `path`, which is created with the first bad sample; lines of earlier
    /// runs are kept and not written twice. Above `max_rate` (a fraction) a report is an error.
    ///
    /// # Errors
    /// [`PipelineError::Io`] when an existing ledger cannot be read.
    pub fn open(path: &Path, max_rate: f64) -> Result<Self, PipelineError> {
        let mut written = HashSet::new();
        match File::open(path) {
            Ok(file) => {
                for line in BufReader::new(file).lines() {
                    let line = line.map_err(|error| PipelineError::io("read", path, error))?;
                    // A killed run may have left a half-written last line, which is ignored.
                    if let Ok(row) = serde_json::from_str::<LedgerRow>(&line) {
                        written.insert((row.shard, row.key));
                    }
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(PipelineError::io("read", path, error)),
        }
        Ok(Self {
            path: path.to_path_buf(),
            max_rate,
            n_seen: AtomicU64::new(0),
            state: Mutex::new(State { file: None, bad: HashSet::new(), written }),
        })
    }

    /// Returns whether `id` was reported in this run.
    pub fn is_bad(&self, id: SampleId) -> bool {
        self.lock().bad.contains(&id)
    }

    /// Returns the number of distinct bad samples of this run.
    pub fn n_bad(&self) -> u64 {
        self.lock().bad.len() as u64
    }

    /// Counts one more requested sample.
    pub fn count_seen(&self) {
        self.n_seen.fetch_add(1, Ordering::Relaxed);
    }

    /// Marks `id` as bad and writes it into the ledger, unless the ledger already contains it.
    ///
    /// # Errors
    /// [`PipelineError::TooManyBad`] above the rate, [`PipelineError::Io`] when the ledger cannot
    /// be written.
    pub fn report(&self, dataset: &Dataset, id: SampleId, reason: &str) -> Result<(), PipelineError> {
        let (shard, key, offset_bytes) = dataset.describe(id);
        let mut state = self.lock();
        if !state.bad.insert(id) {
            return Ok(());
        }
        let n_bad = state.bad.len() as u64;
        if state.written.insert((shard.clone(), key.clone())) {
            let row =
                LedgerRow { shard: shard.clone(), key: key.clone(), offset_bytes, reason: reason.into() };
            self.write_row(&mut state, &row)?;
        }
        let n_seen = self.n_seen.load(Ordering::Relaxed);
        let allowed = self.max_rate * n_seen.max(MIN_SAMPLES_FOR_RATE) as f64;
        let is_chance = self.max_rate > 0.0 && n_bad <= MIN_BAD_FOR_RATE;
        if n_bad as f64 > allowed && !is_chance {
            return Err(PipelineError::TooManyBad {
                n_bad,
                n_seen,
                max_rate_percent: self.max_rate * 100.0,
                shard,
                key,
                reason: reason.into(),
                ledger: self.path.clone(),
            });
        }
        Ok(())
    }

    /// Creates the error for a data set without usable samples.
    pub fn all_bad(&self, n_samples: u64) -> PipelineError {
        PipelineError::AllBad { n_samples, ledger: self.path.clone() }
    }

    fn write_row(&self, state: &mut State, row: &LedgerRow) -> Result<(), PipelineError> {
        let mut line = Vec::new();
        if state.file.is_none() {
            state.file = Some(open_append(&self.path).map_err(|error| self.write_error(error))?);
            // A run that was killed may have left half a line.
            let text = std::fs::read(&self.path).map_err(|error| self.write_error(error))?;
            if text.last().is_some_and(|byte| *byte != b'\n') {
                line.push(b'\n');
            }
        }
        serde_json::to_writer(&mut line, row).map_err(|error| self.write_error(error.into()))?;
        line.push(b'\n');
        match &mut state.file {
            Some(file) => file.write_all(&line).map_err(|error| self.write_error(error)),
            None => Ok(()),
        }
    }

    fn write_error(&self, error: std::io::Error) -> PipelineError {
        PipelineError::io("write", &self.path, error)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // The sets stay valid if a holder panics: each is changed by a single insert.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
