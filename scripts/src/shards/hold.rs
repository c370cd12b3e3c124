//! Lock of an output folder, for one job at a time.

use std::fs::{File, TryLockError};
use std::path::Path;

use anyhow::{Context, bail};

/// Creates the folder `out` and locks it against other jobs for as long as the result lives. Returns `None` if the file
/// system does not support locks.
pub(crate) fn hold(out: &Path) -> anyhow::Result<Option<File>> {
    std::fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    let folder = File::open(out).with_context(|| format!("cannot open {}", out.display()))?;
    match folder.try_lock() {
        Ok(()) => Ok(Some(folder)),
        Err(TryLockError::WouldBlock) => {
            bail!("another job is writing to {}: wait for it, or choose another folder", out.display())
        }
        Err(TryLockError::Error(_)) => Ok(None),
    }
}
