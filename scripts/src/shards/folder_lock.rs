//! Locks of output folders.

use std::fs::{self, File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::parts::{Part, Work};

/// Locks of a job, which are released when the value is dropped.
#[derive(Default)]
pub(crate) struct FolderLock {
    /// Locked files, which are unlocked after the lock file is removed.
    _files: Vec<File>,
    /// Lock file of a part, removed at the end.
    lock_file: Option<PathBuf>,
}

/// Creates the folder `out` and locks it against other jobs for as long as the result lives, if the
/// file system supports locks.
pub(crate) fn lock_folder(out: &Path) -> anyhow::Result<FolderLock> {
    let folder = create_folder(out)?;
    let locked = check_lock(out, folder.try_lock(), folder)?;
    Ok(FolderLock { _files: locked.into_iter().collect(), lock_file: None })
}

/// Locks the folder `out` as [`lock_part`] does if this command does a part of the job `name`, and
/// otherwise as [`lock_folder`] does.
pub(crate) fn lock_for(work: Work, out: &Path, name: &str) -> anyhow::Result<FolderLock> {
    match work {
        Work::Part(part) => lock_part(out, name, part),
        Work::Whole | Work::Join(_) => lock_folder(out),
    }
}

/// Creates the folder `out` and locks it against other jobs, but not against other parts of this
/// one, for as long as the result lives.
pub(crate) fn lock_part(out: &Path, name: &str, part: Part) -> anyhow::Result<FolderLock> {
    let folder = create_folder(out)?;
    let shared = check_lock(out, folder.try_lock_shared(), folder)?;
    let (rank, n_parts) = part.rank();
    let lock_file = out.join(format!("{name}.part-{:05}-of-{n_parts:05}.lock", rank + 1));
    loop {
        let file =
            File::create(&lock_file).with_context(|| format!("cannot create {}", lock_file.display()))?;
        let opened = file.metadata().map(|data| data.ino()).ok();
        let exclusive = check_lock(&lock_file, file.try_lock(), file)?;
        // A process that ends removes its lock file: the file that was locked may have been removed
        // in between.
        let current = fs::metadata(&lock_file).map(|data| data.ino()).ok();
        if exclusive.is_none() || current == opened {
            let files = shared.into_iter().chain(exclusive).collect();
            return Ok(FolderLock { _files: files, lock_file: Some(lock_file) });
        }
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        if let Some(lock_file) = &self.lock_file {
            // The folder may have been removed.
            let _ = fs::remove_file(lock_file);
        }
    }
}

/// Creates the folder `out`, and opens it.
fn create_folder(out: &Path) -> anyhow::Result<File> {
    fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    File::open(out).with_context(|| format!("cannot open {}", out.display()))
}

/// Returns `file` if it is locked, and `None` if the file system does not support locks.
fn check_lock(path: &Path, result: Result<(), TryLockError>, file: File) -> anyhow::Result<Option<File>> {
    match result {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => {
            bail!("another job is writing to {}: wait for it, or choose another folder", path.display())
        }
        Err(TryLockError::Error(_)) => Ok(None),
    }
}
