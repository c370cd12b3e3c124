//! The writer of this rank's heartbeat.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use pipeline::file;
use ranks::flight_recorder::FlightRecorder;

use super::beat::{Heartbeat, LEAVING, heartbeat_path};
use super::process::host_name;
use crate::error::TrainError;
use crate::run::clock::now_s;

/// Time between two heartbeats.
const BEAT: Duration = Duration::from_secs(1);

/// Current position of this rank, which the trainer sets and the heartbeat writes.
#[derive(Debug, Default)]
struct Here {
    step: u64,
    phase: &'static str,
    reason: Option<String>,
    by_itself: bool,
}

/// The heartbeat file, and the sources of its contents.
struct HeartbeatFile {
    path: PathBuf,
    rank: usize,
    host: String,
    pid: u32,
    here: Arc<Mutex<Here>>,
    recorder: Arc<FlightRecorder>,
}

impl HeartbeatFile {
    /// Writes a heartbeat.
    fn write(&self) -> io::Result<()> {
        let (step, phase, reason, by_itself) = {
            let here = self.here.lock().unwrap_or_else(PoisonError::into_inner);
            (here.step, here.phase, here.reason.clone(), here.by_itself)
        };
        let newest = self.recorder.newest();
        let entry = newest.as_ref();
        let beat = Heartbeat {
            rank: self.rank,
            host: self.host.clone(),
            pid: self.pid,
            at_s: now_s(),
            step,
            phase: phase.into(),
            number: entry.map_or(0, |entry| entry.number),
            collective: entry.map_or_else(String::new, |entry| entry.collective.into()),
            unit: entry.map_or_else(String::new, |entry| entry.unit.clone()),
            reason,
            by_itself,
        };
        // Not synced, because nobody needs it after a crash of the machine.
        let temporary = file::temporary(&self.path);
        fs::write(&temporary, serde_json::to_vec(&beat)?)?;
        fs::rename(&temporary, &self.path)
    }
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
    /// [`TrainError::Io`] if the first heartbeat cannot be written.
    pub(crate) fn start(
        folder: &Path,
        rank: usize,
        recorder: Arc<FlightRecorder>,
    ) -> Result<Self, TrainError> {
        fs::create_dir_all(folder).map_err(|error| TrainError::io("create folder", folder, error))?;
        let path = heartbeat_path(folder, rank);
        let here = Arc::<Mutex<Here>>::default();
        let stop = Arc::<AtomicBool>::default();
        let heartbeat_file = HeartbeatFile {
            path: path.clone(),
            rank,
            host: host_name(),
            pid: std::process::id(),
            here: Arc::clone(&here),
            recorder,
        };
        heartbeat_file.write().map_err(|error| TrainError::io("write", &path, error))?;
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("heartbeat".into()).spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                std::thread::park_timeout(BEAT);
                // If a heartbeat cannot be written, as on a full disk, the other ranks notice that
                // it is missing; the run itself continues.
                let _ = heartbeat_file.write();
            }
            // The last heartbeat, with the final state.
            let _ = heartbeat_file.write();
        });
        let thread = thread.map_err(|error| TrainError::io("start the heartbeat of", &path, error))?;
        Ok(Self { here, stop, thread: Some(thread) })
    }

    /// Records the step and the phase that this rank enters.
    pub(crate) fn enter(&self, step: u64, phase: &'static str) {
        let mut here = self.here.lock().unwrap_or_else(PoisonError::into_inner);
        here.step = step;
        here.phase = phase;
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
                here.reason = Some("it has panicked".into());
                here.by_itself = true;
            }
        }
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic of the thread stops only the heartbeat.
            let _ = thread.join();
        }
    }
}
