//! Locks of output folders.

use std::fs::{self, File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::PrepError;
use crate::parts::{Part, Work};

/// Locks of a job, which are released when the value is dropped.
#[derive(Default)]
pub struct FolderLock {
    /// Locked files, which are unlocked after the lock file is removed.
    _files: Vec<File>,
    /// Lock file of a part, removed at the end.
    lock_file: Option<PathBuf>,
}

/// Creates the folder `out` and locks it against other jobs for as long as the result lives, if the
/// file system supports locks.
///
/// # Errors
/// [`PrepError::Busy`], or [`PrepError::Io`].
pub fn lock_folder(out: &Path) -> Result<FolderLock, PrepError> {
    let folder = create_folder(out)?;
    let locked = check_lock(out, folder.try_lock(), folder)?;
    Ok(FolderLock { _files: locked.into_iter().collect(), lock_file: None })
}

/// Locks the folder `out` as [`lock_part`] does if this command does a part of the job `name`, and
/// otherwise as [`lock_folder`] does.
///
/// # Errors
/// [`PrepError::Busy`], or [`PrepError::Io`].
pub fn lock_for(work: Work, out: &Path, name: &str) -> Result<FolderLock, PrepError> {
    match work {
        Work::Part(part) => lock_part(out, name, part),
        Work::Whole | Work::Join(_) => lock_folder(out),
    }
}

/// Creates the folder `out` and locks it against other jobs, but not against other parts of this
/// one, for as long as the result lives.
///
/// # Errors
/// [`PrepError::Busy`], or [`PrepError::Io`].
pub fn lock_part(out: &Path, name: &str, part: Part) -> Result<FolderLock, PrepError> {
    let folder = create_folder(out)?;
    let shared = check_lock(out, folder.try_lock_shared(), folder)?;
    let (rank, n_parts) = part.rank();
    let lock_file = out.join(format!("{name}.part-{:05}-of-{n_parts:05}.lock", rank + 1));
    loop {
        let file = File::create(&lock_file).map_err(|error| PrepError::io("create", &lock_file, error))?;
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
fn create_folder(out: &Path) -> Result<File, PrepError> {
    fs::create_dir_all(out).map_err(|error| PrepError::io("create", out, error))?;
    File::open(out).map_err(|error| PrepError::io("open", out, error))
}

/// Returns `file` if it is locked, and `None` if the file system does not support locks.
fn check_lock(path: &Path, result: Result<(), TryLockError>, file: File) -> Result<Option<File>, PrepError> {
    match result {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Err(PrepError::Busy { path: path.to_path_buf() }),
        Err(TryLockError::Error(_)) => Ok(None),
    }
}
