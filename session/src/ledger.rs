//! Record of the checkpoints that have been scored, and of those that are being scored.
//!
//! `WORKDIR/evaluations/NAME/step-0000001000.json` holds the rows of a checkpoint that was scored;
//! `.claim` beside it marks that a process is scoring it. A claim is touched as long as its owner
//! lives. Both are created so that only one of two concurrent attempts succeeds, on any file system
//! with hard links.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use eval::row::{EVALUATIONS, EvaluationRow};
use serde_json::{Value, json};
use trainer::run::host_name;

use crate::error::SessionError;
use crate::evaluated_network::record;

/// Interval at which a claim is touched.
const TOUCH: Duration = Duration::from_secs(20);

/// Time without a touch after which the owner is considered dead. A process of this machine is
/// considered dead as soon as it has ended.
const STALE: Duration = Duration::from_secs(300);

/// Record of one kind of evaluation.
pub(crate) struct Ledger {
    workdir: PathBuf,
    folder: PathBuf,
    name: String,
}

/// Claim of this process on a checkpoint.
pub(crate) struct Claim<'a> {
    ledger: &'a Ledger,
    step: u64,
    path: PathBuf,
    touching: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Ledger {
    /// Opens the ledger of the evaluations called `name` in `workdir`. Scores that a killed
    /// process had not added to the run are added now.
    pub(crate) fn open(workdir: &Path, name: String) -> Result<Self, SessionError> {
        let folder = workdir.join("evaluations").join(&name);
        fs::create_dir_all(&folder).map_err(|source| SessionError::io("create", &folder, source))?;
        let ledger = Self { workdir: workdir.to_path_buf(), folder, name };
        let entries = fs::read_dir(&ledger.folder)
            .map_err(|source| SessionError::file_system(&ledger.folder, source))?;
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let step = name.strip_prefix("step-").and_then(|rest| rest.strip_suffix(".json"));
            if let Some(step) = step.and_then(|step| step.parse().ok()) {
                ledger.add_to_run(step)?;
            }
        }
        Ok(ledger)
    }

    /// Returns `true` if the checkpoint of `step` has been scored.
    pub(crate) fn is_done(&self, step: u64) -> bool {
        self.file(step, "json").exists()
    }

    /// Returns `true` if a live process is scoring the checkpoint of `step`.
    pub(crate) fn is_claimed(&self, step: u64) -> bool {
        let path = self.file(step, "claim");
        path.exists() && !is_stale(&path)
    }

    /// Claims the checkpoint of `step`; `None` if it has been scored or another process has claimed
    /// it.
    pub(crate) fn claim(&self, step: u64) -> Result<Option<Claim<'_>>, SessionError> {
        let path = self.file(step, "claim");
        let owner = json!({ "host": host_name(), "pid": std::process::id() }).to_string();
        for _ in 0..2 {
            if self.is_done(step) {
                return Ok(None);
            }
            match File::create_new(&path).and_then(|mut file| file.write_all(owner.as_bytes())) {
                Ok(()) => {
                    let touching = Some(touch(path.clone()));
                    return Ok(Some(Claim { ledger: self, step, path, touching }));
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(source) => return Err(SessionError::io("write", &path, source)),
            }
            if !is_stale(&path) {
                return Ok(None);
            }
            // Only one of several processes that find it stale can rename it.
            let aside = path.with_extension(format!("stale-{}", std::process::id()));
            if fs::rename(&path, &aside).is_ok() {
                fs::remove_file(&aside).map_err(|source| SessionError::io("remove", &aside, source))?;
            }
        }
        Ok(None)
    }

    fn file(&self, step: u64, extension: &str) -> PathBuf {
        self.folder.join(format!("step-{step:010}.{extension}"))
    }

    /// Adds the scores of `step` to the run's evaluations, unless they were added before.
    fn add_to_run(&self, step: u64) -> Result<(), SessionError> {
        let path = self.file(step, "json");
        let text = fs::read(&path).map_err(|source| SessionError::io("read", &path, source))?;
        let result: Value =
            serde_json::from_slice(&text).map_err(|source| SessionError::json(&path, source))?;
        // Without the lock, two processes that find no row could both write.
        let lock_file = self.workdir.join("evaluations/.lock");
        let lock = pipeline::file::open_lock(&lock_file)
            .map_err(|source| SessionError::file_system(&lock_file, source))?;
        lock.lock().map_err(|source| SessionError::file_system(&lock_file, source))?;
        let evaluations = self.workdir.join(EVALUATIONS);
        let evaluations = match fs::read_to_string(&evaluations) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(source) => return Err(SessionError::file_system(&evaluations, source)),
        };
        for line in evaluations.lines() {
            let Ok(row) = serde_json::from_str::<Value>(line) else { continue };
            if row["watch"] == self.name && row["about"]["step"] == step {
                return Ok(());
            }
        }
        let rows = serde_json::from_value::<Vec<EvaluationRow>>(result["rows"].clone());
        let rows = rows.map_err(|source| SessionError::json(&path, source))?;
        let mut scalars = Vec::new();
        for (name, value) in result["scalars"].as_object().into_iter().flatten() {
            if let Some(value) = value.as_f64() {
                scalars.push((name.clone(), value));
            }
        }
        record(&self.workdir, step, &rows, &scalars)
    }
}

impl Claim<'_> {
    /// Records that the checkpoint cannot be scored, so that no process tries again.
    pub(crate) fn give_up(self, reason: &str) -> Result<(), SessionError> {
        self.write(&json!({ "rows": [], "scalars": {}, "error": reason }))
    }

    /// Writes the rows and the scalars of the checkpoint, unless another process has written them.
    pub(crate) fn finish(
        self,
        rows: &[EvaluationRow],
        scalars: &[(String, f64)],
    ) -> Result<(), SessionError> {
        let rows: Vec<EvaluationRow> = rows
            .iter()
            .map(|row| EvaluationRow { watch: Some(self.ledger.name.clone()), ..row.clone() })
            .collect();
        let scalars: serde_json::Map<String, Value> =
            scalars.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
        self.write(&json!({ "rows": rows, "scalars": scalars }))
    }

    /// Creates `result` atomically, unless it exists, and adds its rows to the run's evaluations.
    fn write(self, result: &Value) -> Result<(), SessionError> {
        let path = self.ledger.file(self.step, "json");
        let temporary = path.with_extension(format!("json-{}-{}", host_name(), std::process::id()));
        let text = result.to_string();
        let written = pipeline::file::write_synced(&temporary, text.as_bytes())
            .and_then(|()| fs::hard_link(&temporary, &path));
        let _ = fs::remove_file(&temporary);
        if let Err(source) = written
            && source.kind() != ErrorKind::AlreadyExists
        {
            return Err(SessionError::io("write", &path, source));
        }
        self.ledger.add_to_run(self.step)
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.touching.take() {
            drop(stop);
            let _ = thread.join();
        }
        // A claim that remains becomes stale soon.
        let _ = fs::remove_file(&self.path);
    }
}

/// Touches `path` until the sender is dropped.
fn touch(path: PathBuf) -> (Sender<()>, JoinHandle<()>) {
    let (sender, stopped) = channel::<()>();
    let thread = std::thread::spawn(move || {
        while stopped.recv_timeout(TOUCH) == Err(RecvTimeoutError::Timeout) {
            // If the folder is unavailable for long, the claim becomes stale.
            let _ = set_modified(&path, SystemTime::now());
        }
    });
    (sender, thread)
}

fn set_modified(path: &Path, time: SystemTime) -> io::Result<()> {
    File::options().append(true).open(path)?.set_modified(time)
}

/// Returns `true` if the owner of the claim at `path` is dead.
fn is_stale(path: &Path) -> bool {
    if let Ok(modified) = fs::metadata(path).and_then(|metadata| metadata.modified())
        && let Ok(age) = modified.elapsed()
        && age > STALE
    {
        return true;
    }
    let Ok(text) = fs::read(path) else { return false };
    let Ok(owner) = serde_json::from_slice::<Value>(&text) else { return false };
    let Some(pid) = owner["pid"].as_u64() else { return false };
    owner["host"] == host_name()
        && Path::new("/proc/self").exists()
        && !Path::new(&format!("/proc/{pid}")).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count_evaluations(workdir: &Path) -> usize {
        fs::read_to_string(workdir.join("evaluations.jsonl")).unwrap().lines().count()
    }

    #[test]
    fn a_checkpoint_is_scored_once() {
        let workdir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(workdir.path(), "cifar".into()).unwrap();
        let claim = ledger.claim(7).unwrap().unwrap();
        assert!(ledger.is_claimed(7) && ledger.claim(7).unwrap().is_none(), "the checkpoint is claimed");
        let row = json!({ "metric": "knn_20", "accuracy": 50.0, "test": { "set": "cifar" },
            "about": { "step": 7, "network": "n" } });
        let row: EvaluationRow = serde_json::from_value(row).unwrap();
        claim.finish(&[row], &[("eval/cifar/knn_20".into(), 50.0)]).unwrap();
        assert!(ledger.is_done(7) && ledger.claim(7).unwrap().is_none());
        assert_eq!(count_evaluations(workdir.path()), 1);
        // Opening the record again repeats no row and restores a lost one.
        Ledger::open(workdir.path(), "cifar".into()).unwrap();
        assert_eq!(count_evaluations(workdir.path()), 1);
        fs::remove_file(workdir.path().join("evaluations.jsonl")).unwrap();
        Ledger::open(workdir.path(), "cifar".into()).unwrap();
        assert_eq!(count_evaluations(workdir.path()), 1);
    }

    #[test]
    fn claims_of_dead_processes_are_taken_over() {
        let workdir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(workdir.path(), "cifar".into()).unwrap();
        // No process has such an ID.
        let dead = json!({ "host": host_name(), "pid": 4_000_000_000u64 }).to_string();
        fs::write(ledger.file(3, "claim"), dead).unwrap();
        assert!(!ledger.is_claimed(3) && ledger.claim(3).unwrap().is_some());
        // A process of another machine counts as alive until its claim is stale.
        let remote = json!({ "host": "elsewhere", "pid": 1 }).to_string();
        fs::write(ledger.file(4, "claim"), remote).unwrap();
        assert!(ledger.claim(4).unwrap().is_none());
        set_modified(&ledger.file(4, "claim"), SystemTime::now() - 2 * STALE).unwrap();
        assert!(ledger.claim(4).unwrap().is_some());
    }
}
