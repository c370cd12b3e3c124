//! The heartbeat of a rank, as it is stored in its file.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Phase of a rank that has left in order. When ranks are missing, ranks without this phase are
/// blamed first.
pub(super) const LEAVING: &str = "leaving";

/// Status of a rank, written every second.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Heartbeat {
    /// Rank.
    pub rank: usize,
    /// Name of the machine.
    pub host: String,
    /// Number of the process.
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
    /// Whether the reason is a failure of this rank, and not the loss of another one.
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

/// Reads the newest heartbeat of each of the `n_ranks` ranks of the run in `workdir` that has one.
pub(crate) fn read_heartbeats(workdir: &Path, n_ranks: usize) -> Vec<Heartbeat> {
    let folder = heartbeat_folder(workdir);
    (0..n_ranks).filter_map(|rank| read_heartbeat(&folder, rank)).collect()
}

/// Reads the newest heartbeat of `rank` in `folder`; `None` if there is none or it cannot be read.
pub(super) fn read_heartbeat(folder: &Path, rank: usize) -> Option<Heartbeat> {
    serde_json::from_slice(&fs::read(heartbeat_path(folder, rank)).ok()?).ok()
}

/// Folder of the heartbeats of the run in `workdir`.
pub(crate) fn heartbeat_folder(workdir: &Path) -> PathBuf {
    workdir.join("heartbeats")
}

/// File of the heartbeat of `rank` in `folder`.
pub(super) fn heartbeat_path(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank:05}.json"))
}
