//! The writer of this rank's heartbeat.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use pipeline::file;
use ranks::flight_recorder::FlightRecorder;

use super::beat::{Heartbeat, LEAVING, path_of};
use super::process::host_name;
use crate::error::TrainError;
use crate::run::clock::now_s;

/// Time between two heartbeats.
const BEAT: Duration = Duration::from_secs(1);

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
        let host = host_name();
        let pid = std::process::id();
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
        let thread = std::thread::Builder::new().name("heartbeat".into()).spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                std::thread::park_timeout(BEAT);
                // The other ranks see that a beat is missing, as on a full disk; the run itself
                // continues.
                let _ = beat();
            }
            // The last heartbeat, with the final state.
            let _ = beat();
        });
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
