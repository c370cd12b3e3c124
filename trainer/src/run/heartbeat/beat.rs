//! The heartbeat of a rank, as its file holds it.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Phase of a rank that has left by itself, which is not the first to be blamed when ranks are
/// missing.
pub(super) const LEAVING: &str = "leaving";

/// Status of a rank, written every second.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Heartbeat {
    /// Rank.
    pub rank: usize,
    /// Name of its machine.
    pub host: String,
    /// Number of its process.
    pub pid: u32,
    /// Time of the heartbeat, in seconds since 1970.
    pub at_s: f64,
    /// Current step.
    pub step: u64,
    /// Current phase of the step.
    pub phase: String,
    /// Number of the newest collective.
    pub number: u64,
    /// Kind of the newest collective.
    pub collective: String,
    /// Unit or purpose of the newest collective.
    pub unit: String,
    /// Reason for leaving, in the last heartbeat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether the reason is the rank's own, and not the loss of another rank.
    #[serde(default)]
    pub by_itself: bool,
}

impl Heartbeat {
    /// Describes the newest collective.
    pub(super) fn newest_collective(&self) -> String {
        let Self { collective, unit, number, .. } = self;
        if collective.is_empty() {
            "no collective".into()
        } else {
            format!("{collective} of {unit} (number {number})")
        }
    }
}

/// Reads the newest heartbeats of the `n_ranks` ranks of the run in `workdir`, as far as there are
/// any.
pub(crate) fn beats_of(workdir: &Path, n_ranks: usize) -> Vec<Heartbeat> {
    let folder = folder_of(workdir);
    (0..n_ranks)
        .filter_map(|rank| serde_json::from_slice(&fs::read(path_of(&folder, rank)).ok()?).ok())
        .collect()
}

/// Folder of the heartbeats of the run in `workdir`.
pub(crate) fn folder_of(workdir: &Path) -> PathBuf {
    workdir.join("heartbeats")
}

/// File of the heartbeat of `rank` in `folder`.
pub(super) fn path_of(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank:05}.json"))
}
