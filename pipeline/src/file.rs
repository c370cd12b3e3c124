//! Files that are replaced as a whole.

use std::fs;
use std::fs::File;
use std::io;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The name beside `path` under which it is written before it has its own.
pub fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    PathBuf::from(name)
}

/// Writes `path` through a temporary file beside it, synced: a reader, or a run that is killed, finds
/// the old content or the new. Threads and processes may replace the same file at the same time.
///
/// # Errors
/// Those of the file system.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}-{}.tmp", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed)));
    let temporary = PathBuf::from(name);
    let written = write_synced(&temporary, bytes).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Writes `path` and waits until it is on the disk.
///
/// # Errors
/// Those of the file system.
pub fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_old_content_stays_where_the_new_cannot_be_written() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("f");
        replace(&path, b"old").expect("written");
        // Nothing can be written beside a name that long, and no file can replace a folder.
        let taken = folder.path().join("taken");
        fs::create_dir(&taken).expect("created");
        assert!(replace(&taken, b"new").is_err());
        assert!(replace(&folder.path().join("n".repeat(250)), b"new").is_err());
        assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 2, "nothing is left behind");
        replace(&path, b"new").expect("written");
        assert_eq!(fs::read(&path).expect("read"), b"new");
    }

    #[test]
    fn threads_replace_the_same_file() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("f");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..25).for_each(|_| replace(&path, b"same").expect("written")));
            }
        });
        assert_eq!(fs::read(&path).expect("read"), b"same");
    }
}
