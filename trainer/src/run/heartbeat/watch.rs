//! Watch over the heartbeats and processes of the other ranks while this one waits for them.

use std::path::{Path, PathBuf};

use ranks::communicator::Communicator;
use ranks::deadline::{Lost, PeerMonitor};
use ranks::flight_recorder::RecordedCall;
use serde::{Deserialize, Serialize};

use super::beat::{Heartbeat, LEAVING, read_heartbeat};
use super::process::{host_name, start_time};
use super::state::STALE_S;
use crate::error::TrainError;
use crate::run::clock::now_s;
use crate::run::duration::{format_duration, format_time};

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

/// Watch over the other ranks.
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
        let mut processes: Vec<Process> = Vec::with_capacity(all.len());
        let mut neighbors = Vec::new();
        for (other, bytes) in all.iter().enumerate() {
            let process: Process = serde_json::from_slice(bytes).unwrap_or_default();
            // Containers may share a host's name without seeing one another's processes.
            if other != rank && process.host == me.host && process.is_running() {
                neighbors.push(other);
            }
            processes.push(process);
        }
        Ok(Self { rank, folder: folder.to_path_buf(), processes, neighbors })
    }

    /// Reads the heartbeats of the ranks of this run, in the order of ranks. Heartbeats that an
    /// earlier run has left are skipped.
    fn beats(&self) -> Vec<Heartbeat> {
        let mut beats = Vec::new();
        for (rank, process) in self.processes.iter().enumerate() {
            let Some(beat) = read_heartbeat(&self.folder, rank) else { continue };
            if beat.pid == process.pid && beat.host == process.host {
                beats.push(beat);
            }
        }
        beats
    }
}

/// Returns the heartbeat of `rank`.
fn find_beat(beats: &[Heartbeat], rank: usize) -> Option<&Heartbeat> {
    beats.iter().find(|beat| beat.rank == rank)
}

impl PeerMonitor for RankWatch {
    fn lost(&self) -> Option<Lost> {
        let gone: Vec<usize> =
            self.neighbors.iter().copied().filter(|rank| !self.processes[*rank].is_running()).collect();
        if gone.is_empty() {
            return None;
        }
        let beats = self.beats();
        // Ranks that have left in order may have left because of one that has not.
        let mut rank = gone[0];
        for other in gone {
            if find_beat(&beats, other).is_none_or(|beat| beat.phase != LEAVING) {
                rank = other;
                break;
            }
        }
        let process = &self.processes[rank];
        let beat = find_beat(&beats, rank);
        if let Some(beat) = beat
            && let Some(reason) = &beat.reason
        {
            let how = if beat.by_itself { reason.clone() } else { format!("it gave up: {reason}") };
            return Some(Lost { rank, how, by_itself: beat.by_itself });
        }
        let last = match beat {
            Some(beat) => format!(
                "; its last heartbeat, {} ago: step {}, {}, {}",
                format_time(now_s() - beat.at_s),
                beat.step,
                if beat.phase.is_empty() { "starting" } else { beat.phase.as_str() },
                beat.newest_collective()
            ),
            None => String::new(),
        };
        let how = format!("process {} on {} has ended{last}", process.pid, process.host);
        Some(Lost { rank, how, by_itself: false })
    }

    fn suspects(&self, here: &RecordedCall, allows_slow_work: bool) -> Option<String> {
        let mut suspects = self.beats();
        suspects.retain(|beat| beat.rank != self.rank && beat.number <= here.number);
        // Of the ranks that have not passed this collective, those that are furthest behind.
        let first = suspects.iter().map(|beat| beat.number).min();
        suspects.retain(|beat| Some(beat.number) == first);
        let does_slow_work = suspects
            .iter()
            .any(|beat| now_s() - beat.at_s < STALE_S && PATIENT_PHASES.contains(&beat.phase.as_str()));
        if allows_slow_work && does_slow_work {
            return None;
        }
        if suspects.is_empty() {
            return Some("no other rank's heartbeat can be seen".into());
        }
        let mut descriptions = Vec::new();
        for beat in suspects.iter().take(4) {
            descriptions.push(format!(
                "rank {} on {} has reached {} in {} of step {}, last heartbeat {} ago",
                beat.rank,
                beat.host,
                beat.newest_collective(),
                beat.phase,
                beat.step,
                format_duration(now_s() - beat.at_s)
            ));
        }
        Some(descriptions.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use ranks::flight_recorder::FlightRecorder;

    use super::super::beat::heartbeat_path;
    use super::*;

    /// Returns the identity of a running process of this machine.
    fn running_process(pid: u32) -> Process {
        Process { host: host_name(), pid, started: start_time(pid).unwrap() }
    }

    /// Writes a heartbeat of `rank` in step 7.
    fn write_beat(folder: &Path, rank: usize, number: u64, phase: &str) {
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
        std::fs::write(heartbeat_path(folder, rank), serde_json::to_vec(&beat).unwrap()).unwrap();
    }

    #[test]
    fn ended_processes_are_detected() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let watch = RankWatch {
            rank: 0,
            folder: folder.path().to_path_buf(),
            processes: vec![
                Process::default(),
                running_process(std::process::id()),
                running_process(child.id()),
            ],
            neighbors: vec![1, 2],
        };
        assert_eq!(watch.lost(), None);
        child.kill().unwrap();
        let killed = std::time::Instant::now();
        while watch.lost().is_none() {
            assert!(killed.elapsed().as_secs() < 60, "the end of a killed process is not detected");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_eq!(watch.lost().unwrap().rank, 2, "before its parent has waited for it");
        child.wait().unwrap();
        assert_eq!(watch.lost().unwrap().rank, 2);
    }

    #[test]
    fn ranks_behind_are_named_unless_they_do_slow_work() {
        let folder = tempfile::tempdir().unwrap();
        let process = Process { host: "node".into(), pid: 1, started: String::new() };
        let processes = vec![process; 3];
        let watch = RankWatch { rank: 0, folder: folder.path().to_path_buf(), processes, neighbors: vec![] };
        let recorder = FlightRecorder::default();
        recorder.begin(40, "gather", "blocks.4");
        let here = recorder.newest().unwrap();
        write_beat(folder.path(), 1, 40, "forward");
        write_beat(folder.path(), 2, 38, "backward");
        write_beat(folder.path(), 3, 2, "backward");
        let text = watch.suspects(&here, true).unwrap();
        assert!(text.contains("rank 2") && text.contains("blocks.3") && !text.contains("rank 1"), "{text}");
        assert!(!text.contains("rank 3"), "its heartbeat is that of an earlier run: {text}");
        write_beat(folder.path(), 2, 38, "probe");
        assert_eq!(watch.suspects(&here, true), None);
        let text = watch.suspects(&here, false).unwrap();
        assert!(text.contains("rank 2") && text.contains("probe"), "{text}");
    }
}
