//! The other ranks, as this one sees their heartbeats and processes while it waits for them.

use std::fs;
use std::path::{Path, PathBuf};

use ranks::communicator::Communicator;
use ranks::deadline::{Lost, PeerMonitor};
use ranks::flight_recorder::RecordedCall;
use serde::{Deserialize, Serialize};

use super::beat::{Heartbeat, LEAVING, path_of};
use super::process::{host_name, start_time};
use super::state::STALE_S;
use crate::error::TrainError;
use crate::run::clock::now_s;

/// Phases that may take long without a fault, and that not all ranks are in at the same time.
const PATIENT_PHASES: [&str; 3] = ["checkpoint", "data", "probe"];

/// A process on some machine. Start times distinguish it from a later one with the same number.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Process {
    host: String,
    pid: u32,
    started: String,
}

impl Process {
    fn is_running(&self) -> bool {
        start_time(self.pid).as_deref() == Some(self.started.as_str())
    }
}

/// The other ranks, as far as this one can see them.
pub(crate) struct RankWatch {
    rank: usize,
    folder: PathBuf,
    /// Processes by rank.
    processes: Vec<Process>,
    /// Ranks whose processes this rank can see.
    neighbors: Vec<usize>,
}

impl RankWatch {
    /// Exchanges process identities with the other ranks. All ranks call it.
    ///
    /// # Errors
    /// [`TrainError::Ranks`].
    pub(crate) fn new(folder: &Path, comm: &Communicator) -> Result<Self, TrainError> {
        let rank = comm.topology().rank;
        let pid = std::process::id();
        let me = Process { host: host_name(), pid, started: start_time(pid).unwrap_or_default() };
        let all = comm.gather_bytes("processes", serde_json::to_vec(&me).unwrap_or_default())?;
        let processes: Vec<Process> = all
            .iter()
            .map(|bytes| serde_json::from_slice(bytes).unwrap_or_else(|_| Process::default()))
            .collect();
        // Containers may share a host's name and see none of one another's processes.
        let neighbors = (0..processes.len())
            .filter(|other| {
                *other != rank && processes[*other].host == me.host && processes[*other].is_running()
            })
            .collect();
        Ok(Self { rank, folder: folder.to_path_buf(), processes, neighbors })
    }

    /// Reads the heartbeats of this run's ranks, by rank: an earlier run may have left others.
    fn beats(&self) -> Vec<Heartbeat> {
        (0..self.processes.len())
            .filter_map(|rank: usize| -> Option<Heartbeat> {
                let beat: Heartbeat =
                    serde_json::from_slice(&fs::read(path_of(&self.folder, rank)).ok()?).ok()?;
                let process = &self.processes[rank];
                ((beat.pid, &beat.host) == (process.pid, &process.host)).then_some(beat)
            })
            .collect()
    }
}

impl PeerMonitor for RankWatch {
    fn lost(&self) -> Option<Lost> {
        let gone: Vec<usize> =
            self.neighbors.iter().copied().filter(|rank| !self.processes[*rank].is_running()).collect();
        if gone.is_empty() {
            return None;
        }
        let beats = self.beats();
        let beat_of = |rank: usize| beats.iter().find(|beat| beat.rank == rank);
        // Ranks that have left may have left because of one that has not.
        let first = gone.iter().find(|rank| beat_of(**rank).is_none_or(|beat| beat.phase != LEAVING));
        let rank = *first.or(gone.first())?;
        let process = &self.processes[rank];
        if let Some(beat) = beat_of(rank)
            && let Some(reason) = &beat.reason
        {
            let how = if beat.by_itself { reason.clone() } else { format!("it has given up: {reason}") };
            return Some(Lost { rank, how, by_itself: beat.by_itself });
        }
        let last = beat_of(rank).map_or_else(String::new, |beat| {
            let age_s = now_s() - beat.at_s;
            format!(
                "; its last heartbeat, {age_s:.1} s ago: step {}, {}, {}",
                beat.step,
                if beat.phase.is_empty() { "starting" } else { beat.phase.as_str() },
                beat.newest_collective()
            )
        });
        let how = format!("process {} on {} has ended{last}", process.pid, process.host);
        Some(Lost { rank, how, by_itself: false })
    }

    fn suspects(&self, here: &RecordedCall, allows_slow_work: bool) -> Option<String> {
        let beats = self.beats();
        let behind = |beat: &&Heartbeat| beat.rank != self.rank && beat.number <= here.number;
        let first = beats.iter().filter(behind).map(|beat| beat.number).min();
        let suspects: Vec<&Heartbeat> =
            beats.iter().filter(behind).filter(|beat| Some(beat.number) == first).collect();
        let fresh = |beat: &Heartbeat| now_s() - beat.at_s < STALE_S;
        if allows_slow_work
            && suspects.iter().any(|beat| fresh(beat) && PATIENT_PHASES.contains(&beat.phase.as_str()))
        {
            return None;
        }
        let said: Vec<String> = suspects
            .iter()
            .take(4)
            .map(|beat| {
                format!(
                    "rank {} on {} has reached {} in {} of step {}, last heartbeat {:.0} s ago",
                    beat.rank,
                    beat.host,
                    beat.newest_collective(),
                    beat.phase,
                    beat.step,
                    now_s() - beat.at_s
                )
            })
            .collect();
        Some(match said.as_slice() {
            [] => "no other rank's heartbeat can be seen".into(),
            said => said.join("; "),
        })
    }
}

#[cfg(test)]
mod tests {
    use ranks::flight_recorder::FlightRecorder;

    use super::*;

    #[test]
    fn a_process_that_ends_is_seen_to_have_ended() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = |pid| Process { host: host_name(), pid, started: start_time(pid).unwrap() };
        let folder = tempfile::tempdir().unwrap();
        let watch = RankWatch {
            rank: 0,
            folder: folder.path().to_path_buf(),
            processes: vec![Process::default(), process(std::process::id()), process(child.id())],
            neighbors: vec![1, 2],
        };
        assert_eq!(watch.lost(), None);
        child.kill().unwrap();
        while watch.lost().is_none() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_eq!(watch.lost().unwrap().rank, 2, "even before anybody has waited for it");
        child.wait().unwrap();
        assert_eq!(watch.lost().unwrap().rank, 2);
    }

    #[test]
    fn who_is_behind_is_named_and_who_is_busy_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let beat = |rank: usize, number: u64, phase: &str| {
            let beat = Heartbeat {
                rank,
                host: "node".into(),
                pid: 1,
                at_s: now_s(),
                step: 7,
                phase: phase.into(),
                number,
                collective: "gather".into(),
                unit: "blocks.3".into(),
                reason: None,
                by_itself: false,
            };
            fs::write(path_of(folder.path(), rank), serde_json::to_vec(&beat).unwrap()).unwrap();
        };
        let process = Process { host: "node".into(), pid: 1, started: String::new() };
        let processes = vec![process; 3];
        let watch = RankWatch { rank: 0, folder: folder.path().to_path_buf(), processes, neighbors: vec![] };
        let recorder = FlightRecorder::default();
        recorder.begin(40, "gather", "blocks.4");
        let here = recorder.newest().unwrap();
        beat(1, 40, "forward");
        beat(2, 38, "backward");
        beat(3, 2, "backward");
        let said = watch.suspects(&here, true).unwrap();
        assert!(said.contains("rank 2") && said.contains("blocks.3") && !said.contains("rank 1"), "{said}");
        assert!(!said.contains("rank 3"), "which an earlier run has left: {said}");
        beat(2, 38, "probe");
        assert_eq!(watch.suspects(&here, true), None);
        let said = watch.suspects(&here, false).unwrap();
        assert!(said.contains("rank 2") && said.contains("probe"), "even patience ends: {said}");
    }
}
