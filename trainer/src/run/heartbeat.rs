//! Liveness and progress of ranks: a heartbeat file of each, and the processes of this machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use pipeline::file;
use ranks::communicator::Communicator;
use ranks::deadline::{Lost, PeerMonitor};
use ranks::flight_recorder::{FlightRecorder, RecordedCall};
use serde::{Deserialize, Serialize};

use super::clock::now_s;
use crate::error::TrainError;

/// Time between two heartbeats.
const BEAT: Duration = Duration::from_secs(1);

/// Age in seconds above which a heartbeat is that of a rank that is gone or stuck.
const STALE_S: f64 = 15.0;

/// Seconds without a heartbeat after which a process that is not found on this machine has ended.
const SILENT_S: f64 = 4.0;

/// Phases that may take long without a fault, and that not all ranks are in at the same time.
const PATIENT_PHASES: [&str; 3] = ["checkpoint", "data", "probe"];

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

/// Phase of a rank that has left by itself, which is not the first to be blamed when ranks are missing.
const LEAVING: &str = "leaving";

/// Current position of this rank: set by the trainer, written by the heartbeat.
#[derive(Debug, Default)]
struct Here {
    step: u64,
    phase: &'static str,
    reason: Option<String>,
    by_itself: bool,
}

/// Heartbeat of this rank, which stops when it is dropped.
pub(crate) struct HeartbeatWriter {
    here: Arc<Mutex<Here>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl HeartbeatWriter {
    /// Starts the heartbeat in `folder`.
    ///
    /// # Errors
    /// [`TrainError::Io`] when the first beat cannot be written.
    pub(crate) fn start(
        folder: &Path,
        rank: usize,
        recorder: Arc<FlightRecorder>,
    ) -> Result<Self, TrainError> {
        fs::create_dir_all(folder).map_err(|error| TrainError::io("create folder", folder, error))?;
        let path = path_of(folder, rank);
        let here = Arc::<Mutex<Here>>::default();
        let stop = Arc::<AtomicBool>::default();
        let (host, pid) = (host_name(), std::process::id());
        let beat = {
            let here = Arc::clone(&here);
            let path = path.clone();
            move || -> std::io::Result<()> {
                let (step, phase, reason, by_itself) = {
                    let here = here.lock().unwrap_or_else(PoisonError::into_inner);
                    (here.step, here.phase, here.reason.clone(), here.by_itself)
                };
                let newest = recorder.newest();
                let entry = newest.as_ref();
                let beat = Heartbeat {
                    rank,
                    host: host.clone(),
                    pid,
                    at_s: now_s(),
                    step,
                    phase: phase.into(),
                    number: entry.map_or(0, |entry| entry.number),
                    collective: entry.map_or_else(String::new, |entry| entry.collective.into()),
                    unit: entry.map_or_else(String::new, |entry| entry.unit.clone()),
                    reason,
                    by_itself,
                };
                // Unsynced: nobody needs it after a crash of the machine.
                let temporary = file::temporary(&path);
                fs::write(&temporary, serde_json::to_vec(&beat)?)?;
                fs::rename(&temporary, &path)
            }
        };
        beat().map_err(|error| TrainError::io("write", &path, error))?;
        let stopped = Arc::clone(&stop);
        let run = move || {
            while !stopped.load(Ordering::Relaxed) {
                std::thread::park_timeout(BEAT);
                // The other ranks see that a beat is missing, as on a full disk; the run itself continues.
                let _ = beat();
            }
            // The last heartbeat, with the final state.
            let _ = beat();
        };
        let thread = std::thread::Builder::new().name("heartbeat".into()).spawn(run);
        let thread = thread.map_err(|error| TrainError::io("start the heartbeat of", &path, error))?;
        Ok(Self { here, stop, thread: Some(thread) })
    }

    /// Records the step and the phase that this rank enters.
    pub(crate) fn enter(&self, step: u64, phase: &'static str) {
        let mut here = self.here.lock().unwrap_or_else(PoisonError::into_inner);
        (here.step, here.phase) = (step, phase);
    }

    /// Records for the other ranks why this rank gives up.
    pub(crate) fn give_up(&self, error: &TrainError) {
        let mut here = self.here.lock().unwrap_or_else(PoisonError::into_inner);
        here.reason = Some(error.to_string());
        here.by_itself = !matches!(error, TrainError::Ranks(_) | TrainError::PeersFailed { .. });
    }
}

impl Drop for HeartbeatWriter {
    fn drop(&mut self) {
        {
            let mut here = self.here.lock().unwrap_or_else(PoisonError::into_inner);
            here.phase = LEAVING;
            if std::thread::panicking() && here.reason.is_none() {
                (here.reason, here.by_itself) = (Some("it has panicked".into()), true);
            }
        }
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic of the thread has stopped nothing but the heartbeat.
            let _ = thread.join();
        }
    }
}

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
        let parse = |bytes: &Vec<u8>| serde_json::from_slice(bytes).unwrap_or_else(|_| Process::default());
        let processes: Vec<Process> = all.iter().map(parse).collect();
        // Containers may share a host's name and see none of one another's processes.
        let seen = |other: &usize| {
            *other != rank && processes[*other].host == me.host && processes[*other].is_running()
        };
        let neighbors = (0..processes.len()).filter(seen).collect();
        Ok(Self { rank, folder: folder.to_path_buf(), processes, neighbors })
    }

    /// Reads the heartbeats of this run's ranks, by rank: an earlier run may have left others.
    fn beats(&self) -> Vec<Heartbeat> {
        let read = |rank: usize| -> Option<Heartbeat> {
            let beat: Heartbeat =
                serde_json::from_slice(&fs::read(path_of(&self.folder, rank)).ok()?).ok()?;
            let process = &self.processes[rank];
            ((beat.pid, &beat.host) == (process.pid, &process.host)).then_some(beat)
        };
        (0..self.processes.len()).filter_map(read).collect()
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
                at(beat)
            )
        });
        let how = format!("process {} on {} has ended{last}", process.pid, process.host);
        Some(Lost { rank, how, by_itself: false })
    }

    fn suspects(&self, here: &RecordedCall, is_patient: bool) -> Option<String> {
        let beats = self.beats();
        let behind = |beat: &&Heartbeat| beat.rank != self.rank && beat.number <= here.number;
        let first = beats.iter().filter(behind).map(|beat| beat.number).min();
        let suspects: Vec<&Heartbeat> =
            beats.iter().filter(behind).filter(|beat| Some(beat.number) == first).collect();
        let fresh = |beat: &Heartbeat| now_s() - beat.at_s < STALE_S;
        if is_patient
            && suspects.iter().any(|beat| fresh(beat) && PATIENT_PHASES.contains(&beat.phase.as_str()))
        {
            return None;
        }
        let say = |beat: &&Heartbeat| {
            format!(
                "rank {} on {} has reached {} in {} of step {}, last heartbeat {:.0} s ago",
                beat.rank,
                beat.host,
                at(beat),
                beat.phase,
                beat.step,
                now_s() - beat.at_s
            )
        };
        let said: Vec<String> = suspects.iter().take(4).map(say).collect();
        Some(match said.as_slice() {
            [] => "no other rank's heartbeat can be seen".into(),
            said => said.join("; "),
        })
    }
}

/// State of a rank according to its heartbeat, seen from any machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RankState {
    /// The heartbeat is fresh.
    Alive,
    /// The heartbeat is the last one of a rank that has left.
    Left,
    /// The rank is gone without notice, or stuck: the reason in words.
    Gone(String),
}

/// Reads the newest heartbeats of the `n_ranks` ranks of the run in `workdir`, as far as there are any.
pub(super) fn beats_of(workdir: &Path, n_ranks: usize) -> Vec<Heartbeat> {
    let folder = folder_of(workdir);
    let read = |rank| serde_json::from_slice(&fs::read(path_of(&folder, rank)).ok()?).ok();
    (0..n_ranks).filter_map(read).collect()
}

/// Folder of the heartbeats of the run in `workdir`.
pub(super) fn folder_of(workdir: &Path) -> PathBuf {
    workdir.join("heartbeats")
}

/// State of the rank that wrote `beat`, as of now.
pub(super) fn rank_state(beat: &Heartbeat) -> RankState {
    if beat.phase == LEAVING {
        return RankState::Left;
    }
    // Clocks of machines may differ in both directions.
    let age_s = (now_s() - beat.at_s).abs();
    // Containers may share a host's name and see none of one another's processes: a fresh beat is proof of life.
    if age_s > SILENT_S && beat.host == host_name() && start_time(beat.pid).is_none() {
        return RankState::Gone(format!("process {} has ended", beat.pid));
    }
    match age_s < STALE_S {
        true => RankState::Alive,
        false => RankState::Gone(format!("the last heartbeat is {} old", human_age(age_s))),
    }
}

/// Formats an age: `40 s`, `12 min`, `5 h`, `3 days`.
fn human_age(age_s: f64) -> String {
    match age_s {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.0} h", s / 3600.0),
        s => format!("{:.0} days", s / 86_400.0),
    }
}

fn at(beat: &Heartbeat) -> String {
    match beat.collective.is_empty() {
        true => "no collective".into(),
        false => format!("{} of {} (number {})", beat.collective, beat.unit, beat.number),
    }
}

fn path_of(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank:05}.json"))
}

/// Name of this machine.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Start time of process `pid`, in ticks since the machine started; `None` if there is none, or a dead one that
/// its parent has not waited for.
fn start_time(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; fields are counted from behind it.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    match fields.next()? {
        "Z" | "X" => None,
        _ => fields.nth(18).map(str::to_string),
    }
}

#[cfg(test)]
mod tests {
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
            std::thread::sleep(Duration::from_millis(5));
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
