//! Files that are replaced as a whole.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The name beside `path` under which it is written before it has its own.
pub fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    PathBuf::from(name)
}

/// Writes `path` through a temporary file beside it, synced: a reader, or a run that is killed, finds
/// the old content or the new.
///
/// # Errors
/// Those of the file system.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = temporary(path);
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_old_content_stays_where_the_new_cannot_be_written() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("f");
        replace(&path, b"old").expect("written");
        // The temporary name is taken by a folder.
        fs::create_dir(temporary(&path)).expect("created");
        assert!(replace(&path, b"new").is_err());
        assert_eq!(fs::read(&path).expect("read"), b"old");
        fs::remove_dir(temporary(&path)).expect("removed");
        replace(&path, b"new").expect("written");
        assert_eq!(fs::read(&path).expect("read"), b"new");
    }
}
