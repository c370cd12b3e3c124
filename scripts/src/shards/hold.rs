//! One job at a time in an output folder.

use std::fs::{File, TryLockError};
use std::path::Path;

use anyhow::{Context, bail};

/// Keeps other jobs out of the folder `out`, which is made, for as long as the result lives. Nothing is held where the file
/// system knows no locks.
pub(crate) fn hold(out: &Path) -> anyhow::Result<Option<File>> {
    std::fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    let folder = File::open(out).with_context(|| format!("cannot open {}", out.display()))?;
    match folder.try_lock() {
        Ok(()) => Ok(Some(folder)),
        Err(TryLockError::WouldBlock) => {
            bail!("another job writes into {}: wait for it, or choose another folder", out.display())
        }
        Err(TryLockError::Error(_)) => Ok(None),
    }
}
