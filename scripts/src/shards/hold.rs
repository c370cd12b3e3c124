//! Locks of output folders.

use std::fs::{self, File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::parts::{Part, Work};

/// Locks that a job has for as long as the value lives.
#[derive(Default)]
pub(crate) struct Held {
    /// Locked files, which are unlocked after the mark is removed.
    _files: Vec<File>,
    /// File that marks a part as being worked on, removed in the end.
    mark: Option<PathBuf>,
}

/// Creates the folder `out` and locks it against other jobs for as long as the result lives, if the
/// file system supports locks.
pub(crate) fn hold(out: &Path) -> anyhow::Result<Held> {
    let folder = open(out)?;
    Ok(Held { _files: locked(out, folder.try_lock(), folder)?.into_iter().collect(), mark: None })
}

/// Locks the folder `out` as [`hold`] does, or as [`hold_part`] does if this command does a part of
/// the job `name`.
pub(crate) fn hold_for(work: Work, out: &Path, name: &str) -> anyhow::Result<Held> {
    match work {
        Work::Part(part) => hold_part(out, name, part),
        Work::Whole | Work::Join(_) => hold(out),
    }
}

/// Creates the folder `out` and locks it against other jobs, but not against other parts of this
/// one, for as long as the result lives.
pub(crate) fn hold_part(out: &Path, name: &str, part: Part) -> anyhow::Result<Held> {
    let folder = open(out)?;
    let shared = locked(out, folder.try_lock_shared(), folder)?;
    let (rank, n_parts) = part.rank();
    let mark = out.join(format!("{name}.part-{:05}-of-{n_parts:05}.lock", rank + 1));
    loop {
        let file = File::create(&mark).with_context(|| format!("cannot create {}", mark.display()))?;
        let opened = file.metadata().map(|data| data.ino());
        let own = locked(&mark, file.try_lock(), file)?;
        // A process that ends removes its mark: what was locked may be no file of the folder any
        // more.
        if own.is_none() || fs::metadata(&mark).map(|data| data.ino()).ok() == opened.ok() {
            return Ok(Held { _files: shared.into_iter().chain(own).collect(), mark: Some(mark) });
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(mark) = &self.mark {
            // It may be gone with its folder.
            let _ = fs::remove_file(mark);
        }
    }
}

fn open(out: &Path) -> anyhow::Result<File> {
    fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    File::open(out).with_context(|| format!("cannot open {}", out.display()))
}

/// Returns `file` if it is locked, and `None` if the file system does not support locks.
fn locked(path: &Path, result: Result<(), TryLockError>, file: File) -> anyhow::Result<Option<File>> {
    match result {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => {
            bail!("another job is writing to {}: wait for it, or choose another folder", path.display())
        }
        Err(TryLockError::Error(_)) => Ok(None),
    }
}
