//! Partial files: written by one process at a time, and invalid once that process has ended.

use std::fs;
use std::fs::{File, TryLockError};
use std::io;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

/// `ENOLCK` of Linux: a network file system without a lock server.
const ENOLCK: i32 = 37;

/// Opens and locks a partial file; waits while another process writes it. Its previous contents are
/// invalid.
pub(crate) fn lock_part(part: &Path) -> io::Result<File> {
    loop {
        let file = File::options().create(true).read(true).write(true).truncate(false).open(part)?;
        match file.lock() {
            // Without locks, a cache is assumed to be used by one process at a time.
            Err(error) if error.kind() == ErrorKind::Unsupported || error.raw_os_error() == Some(ENOLCK) => {
                return Ok(file);
            }
            result => result?,
        }
        // The previous holder of the lock may have renamed or removed the file that was opened
        // here.
        match fs::metadata(part) {
            Ok(metadata) if metadata.ino() == file.metadata()?.ino() => return Ok(file),
            _ => continue,
        }
    }
}

/// Removes a partial file that no process writes any more; returns whether it was removed.
pub(crate) fn remove_if_abandoned(part: &Path) -> bool {
    let Ok(file) = File::options().write(true).open(part) else { return false };
    match file.try_lock() {
        // Between opening and locking, the file may have been renamed, and another one created
        // under its name.
        Ok(()) => {
            let is_same_file =
                matches!((file.metadata(), fs::metadata(part)), (Ok(a), Ok(b)) if a.ino() == b.ino());
            is_same_file && fs::remove_file(part).is_ok()
        }
        Err(TryLockError::WouldBlock | TryLockError::Error(_)) => false,
    }
}

/// Sets the length of a file, and allocates its blocks where the file system supports that.
pub(crate) fn allocate(file: &File, len_bytes: u64) -> io::Result<()> {
    if len_bytes == 0 {
        return file.set_len(0);
    }
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len_bytes) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => file.set_len(len_bytes),
        result => Ok(result?),
    }
}
