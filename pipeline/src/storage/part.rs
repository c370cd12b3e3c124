//! Partial files: written by one process at a time, and void when that has ended.

use std::fs;
use std::fs::{File, TryLockError};
use std::io;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

/// `ENOLCK` of Linux: a network file system without a lock server.
const NO_LOCKS: i32 = 37;

/// Opens and locks a partial file; waits while another process writes it. What it holds is void.
pub(crate) fn lock_part(part: &Path) -> io::Result<File> {
    loop {
        let file = File::options().create(true).read(true).write(true).truncate(false).open(part)?;
        match file.lock() {
            // A file system without locks has one process for each cache, one hopes.
            Err(error)
                if error.kind() == ErrorKind::Unsupported || error.raw_os_error() == Some(NO_LOCKS) =>
            {
                return Ok(file);
            }
            locked => locked?,
        }
        // Whoever had the lock before may have renamed or removed what was opened here.
        match fs::metadata(part) {
            Ok(meta) if meta.ino() == file.metadata()?.ino() => return Ok(file),
            _ => continue,
        }
    }
}

/// Removes a partial file that no process writes any more.
pub(crate) fn remove_if_abandoned(part: &Path) -> bool {
    let Ok(file) = File::options().write(true).open(part) else { return false };
    match file.try_lock() {
        // Between opening and locking it may have become a shard, and another one have taken its name.
        Ok(()) => {
            let same = matches!((file.metadata(), fs::metadata(part)), (Ok(a), Ok(b)) if a.ino() == b.ino());
            same && fs::remove_file(part).is_ok()
        }
        Err(TryLockError::WouldBlock | TryLockError::Error(_)) => false,
    }
}

/// Gives a file its length and the blocks for it, where the file system can promise blocks.
pub(crate) fn allocate(file: &File, len_bytes: u64) -> io::Result<()> {
    if len_bytes == 0 {
        return file.set_len(0);
    }
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len_bytes) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => file.set_len(len_bytes),
        allocated => Ok(allocated?),
    }
}
