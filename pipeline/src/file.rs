//! Files that are written atomically, checksums of texts, and lock files.
//!
//! A file is written under a temporary name and renamed when it is complete. The temporary file is
//! locked while it is written, so that the next process that writes into the folder recognizes and
//! removes the files of a killed one.

use std::collections::HashSet;
use std::fs;
use std::fs::File;
use std::io;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64;

/// Age above which an unlocked temporary file was left by a killed process.
const ABANDONED_AFTER: Duration = Duration::from_secs(10);

/// Beginning of the last line of a sealed text, before the hash of the lines above it.
const SEAL: &str = "xxh3 ";

/// Length of the last line of a sealed text: the beginning, 16 digits and the end of the line.
const SEAL_BYTES: usize = SEAL.len() + 17;

/// Returns the name beside `path` under which the file is written before it is renamed.
pub fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    PathBuf::from(name)
}

/// Writes `path` through a temporary file beside it, synced: a reader finds the old content or the
/// new, even if the process is killed. Threads and processes may replace the same file at the same
/// time.
///
/// # Errors
/// Returns the error of the file system.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(bytes)?;
    file.finish()
}

/// A file that gets its name when it is complete and on the disk. If it is dropped before, its
/// temporary file is removed.
#[derive(Debug)]
pub struct AtomicFile {
    path: PathBuf,
    temporary: PathBuf,
    out: BufWriter<File>,
    is_finished: bool,
}

impl AtomicFile {
    /// Begins to write the file at `path`, which stays as it is until [`AtomicFile::finish`].
    ///
    /// # Errors
    /// Returns the error of the file system.
    pub fn create(path: &Path) -> io::Result<Self> {
        remove_abandoned_once(parent_folder(path));
        let temporary = unique_temporary(path);
        let file = File::create_new(&temporary)?;
        // If the file system has no locks, files of killed processes are not removed.
        let _ = file.try_lock();
        let out = BufWriter::with_capacity(1 << 18, file);
        Ok(Self { path: path.to_path_buf(), temporary, out, is_finished: false })
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// Returns the error of the file system.
    pub fn finish(mut self) -> io::Result<()> {
        self.out.flush()?;
        self.out.get_ref().sync_all()?;
        fs::rename(&self.temporary, &self.path)?;
        self.is_finished = true;
        Ok(())
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.is_finished {
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Writes `path` as [`replace`] does, without waiting for the disk: a reader finds the old content
/// or the new even if the process is killed, but perhaps neither after a power failure. For many
/// small files.
///
/// # Errors
/// Returns the error of the file system.
pub fn replace_unsynced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = unique_temporary(path);
    let result = fs::write(&temporary, bytes).and_then(|()| fs::rename(&temporary, path));
    if result.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    result
}

/// Removes the temporary files of killed processes in `folder`, the first time that this process
/// writes into it.
fn remove_abandoned_once(folder: &Path) {
    static SEEN: Mutex<Option<HashSet<PathBuf>>> = Mutex::new(None);
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    if !seen.get_or_insert_default().insert(folder.to_path_buf()) {
        return;
    }
    drop(seen);
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if is_temporary(&entry.file_name().to_string_lossy()) {
            remove_if_abandoned(&entry.path());
        }
    }
}

/// Removes the temporary file at `path` if no process writes it any more. Failures are ignored: it
/// may be another user's.
fn remove_if_abandoned(path: &Path) {
    use std::os::unix::fs::OpenOptionsExt;
    if !fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file()) {
        return;
    }
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let Ok(file) = File::options().write(true).custom_flags(flags.bits() as i32).open(path) else { return };
    let Ok(modified) = file.metadata().and_then(|metadata| metadata.modified()) else { return };
    let Ok(age) = modified.elapsed() else { return };
    // A writer locks its file a moment after it has created it.
    if age > ABANDONED_AFTER && file.try_lock().is_ok() {
        let _ = fs::remove_file(path);
    }
}

/// Returns whether `name` has the form of a name from [`unique_temporary`].
fn is_temporary(name: &str) -> bool {
    let Some(rest) = name.strip_suffix(".tmp") else { return false };
    let Some((_, marks)) = rest.rsplit_once('.') else { return false };
    let Some((random, number)) = marks.split_once('-') else { return false };
    random.len() == 8
        && random.bytes().all(|byte| byte.is_ascii_hexdigit())
        && !number.is_empty()
        && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns `text` with an additional last line, the hash of the lines above it.
pub fn seal(mut text: Vec<u8>) -> Vec<u8> {
    if !text.ends_with(b"\n") {
        text.push(b'\n');
    }
    let hash = xxh3_64(&text);
    text.extend_from_slice(format!("{SEAL}{hash:016x}\n").as_bytes());
    text
}

/// Returns the text that was passed to [`seal`], with a line break at its end; `None` if a byte of
/// it has changed.
pub fn unseal(sealed: &[u8]) -> Option<&[u8]> {
    let (text, last) = sealed.split_at_checked(sealed.len().checked_sub(SEAL_BYTES)?)?;
    (last == format!("{SEAL}{:016x}\n", xxh3_64(text)).as_bytes()).then_some(text)
}

/// Replaces several files, the last of which completes the others: weights, after their
/// configurations. All are written to temporary files before any of them is replaced, so that a
/// full disk changes nothing; the last one is removed before the others are replaced, so that a
/// reader never finds it beside files of another version.
///
/// # Errors
/// Returns the file that failed, and the error of the file system.
pub fn replace_all(files: &[(PathBuf, Vec<u8>)]) -> Result<(), (PathBuf, io::Error)> {
    let mut temporaries = Temporaries::default();
    // Locked until they are renamed, so that no other process takes them for files of a killed one.
    let mut locked = Vec::new();
    for (path, bytes) in files {
        let temporary = unique_temporary(path);
        temporaries.0.push(temporary.clone());
        write_synced(&temporary, bytes).map_err(|error| (path.clone(), error))?;
        let file = File::options().append(true).open(&temporary).map_err(|error| (path.clone(), error))?;
        let _ = file.try_lock();
        locked.push(file);
    }
    let Some(((last, _), others)) = files.split_last() else { return Ok(()) };
    if !others.is_empty() {
        match fs::remove_file(last) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err((last.clone(), error)),
            _ => sync_parent_folder(last),
        }
    }
    for ((path, _), temporary) in files.iter().zip(&temporaries.0) {
        if path == last {
            for (other, _) in others {
                sync_parent_folder(other);
            }
        }
        fs::rename(temporary, path).map_err(|error| (path.clone(), error))?;
    }
    sync_parent_folder(last);
    Ok(())
}

/// Temporary files that are removed on drop unless they were renamed.
#[derive(Default)]
struct Temporaries(Vec<PathBuf>);

impl Drop for Temporaries {
    fn drop(&mut self) {
        for path in &self.0 {
            // Renamed files no longer have these names, so that their removal fails.
            let _ = fs::remove_file(path);
        }
    }
}

/// Syncs the folder of `path`, so that renames are durable, if the file system supports that.
fn sync_parent_folder(path: &Path) {
    if let Ok(folder) = File::open(parent_folder(path)) {
        let _ = folder.sync_all();
    }
}

/// Returns the folder of the file at `path`.
fn parent_folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns the path of a temporary file beside `path` that no other thread or process uses, on any
/// machine that has mounted the folder.
fn unique_temporary(path: &Path) -> PathBuf {
    use std::hash::{BuildHasher, RandomState};
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    // Processes in containers often have the same number.
    let random = RandomState::new().hash_one(std::process::id()) as u32;
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{random:08x}-{}.tmp", COUNTER.fetch_add(1, Ordering::Relaxed)));
    PathBuf::from(name)
}

/// Writes `path` as [`replace`] does if there is no such file; returns whether it was written. If
/// several processes do so at the same time, one succeeds.
///
/// # Errors
/// Returns the error of the file system.
pub fn create_new(path: &Path, bytes: &[u8]) -> io::Result<bool> {
    let temporary = unique_temporary(path);
    let result = write_synced(&temporary, bytes).and_then(|()| fs::hard_link(&temporary, path));
    let _ = fs::remove_file(&temporary);
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        // Some file systems have no hard links: the file is renamed, which may replace one that
        // another process has just written.
        Err(error) if error.kind() == io::ErrorKind::Unsupported || error.raw_os_error() == Some(1) => {
            if path.exists() {
                return Ok(false);
            }
            replace(path, bytes).map(|()| true)
        }
        Err(error) => Err(error),
    }
}

/// Opens a lock file, and creates it if it does not exist. A symbolic link is refused, because its
/// target may belong to someone else, and so is a pipe without a reader.
///
/// # Errors
/// Returns the error of the file system; fails for a symbolic link and for a pipe without a reader.
pub fn open_lock(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    File::options().create(true).write(true).truncate(false).custom_flags(flags.bits() as i32).open(path)
}

/// Opens a file to append to it, and creates it if it does not exist. A symbolic link is refused:
/// in a shared folder, another user could create one to redirect the writes.
///
/// # Errors
/// Returns the error of the file system.
pub fn open_append(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let flags = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
    let opened = File::options().create(true).append(true).custom_flags(flags).open(path);
    opened.map_err(|error| match error.raw_os_error() {
        Some(code) if code == rustix::io::Errno::LOOP.raw_os_error() => {
            io::Error::other("it is a symbolic link; links are not followed")
        }
        _ => error,
    })
}

/// Creates the parent folder of `path`.
///
/// # Errors
/// Fails if the folder cannot be created.
pub fn create_parent(path: &Path) -> io::Result<()> {
    match path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        Some(parent) => fs::create_dir_all(parent),
        None => Ok(()),
    }
}

/// Writes `path` and waits until it is on the disk.
///
/// # Errors
/// Returns the error of the file system.
pub fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_replacement_keeps_the_old_content() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("f");
        replace(&path, b"old").expect("written");
        // No file can replace a folder, and the temporary name for the second path is too long.
        let subfolder = folder.path().join("subfolder");
        fs::create_dir(&subfolder).expect("created");
        assert!(replace(&subfolder, b"new").is_err());
        assert!(replace(&folder.path().join("n".repeat(250)), b"new").is_err());
        assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 2, "nothing is left behind");
        replace(&path, b"new").expect("written");
        assert_eq!(fs::read(&path).expect("read"), b"new");
    }

    /// Old temporary files are removed, unless a process still writes them.
    #[test]
    fn temporary_files_of_killed_processes_are_removed() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("f.json");
        let abandoned = unique_temporary(&path);
        let recent = unique_temporary(&path);
        let in_use = unique_temporary(&path);
        let others =
            ["f.json.tmp", "f.0123-4.tmp", "notes.01234567-x.tmp"].map(|name| folder.path().join(name));
        let old = std::time::SystemTime::now() - 2 * ABANDONED_AFTER;
        for path in [&abandoned, &recent, &in_use].into_iter().chain(&others) {
            fs::write(path, b"half").expect("written");
        }
        let locked = File::options().append(true).open(&in_use).expect("opened");
        locked.lock().expect("locked");
        for path in [&abandoned, &in_use].into_iter().chain(&others) {
            File::options().append(true).open(path).and_then(|file| file.set_modified(old)).expect("set");
        }
        replace(&path, b"whole").expect("written");
        assert!(!abandoned.exists());
        assert!(recent.exists() && in_use.exists() && others.iter().all(|path| path.exists()));
    }

    #[test]
    fn unseal_detects_every_changed_bit() {
        let sealed = seal(b"{\"a\": [1, 2]}".to_vec());
        assert_eq!(unseal(&sealed), Some(&b"{\"a\": [1, 2]}\n"[..]));
        for at in 0..sealed.len() {
            for bit in 0..8 {
                let mut changed = sealed.clone();
                changed[at] ^= 1 << bit;
                assert_eq!(unseal(&changed), None, "byte {at}, bit {bit}");
            }
            assert_eq!(unseal(&sealed[..at]), None);
        }
    }

    /// A folder in place of one of the files stands in for any failure between two renames.
    #[test]
    fn failed_replacement_of_several_files_never_mixes_versions() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let config = folder.path().join("config");
        let weights = folder.path().join("weights");
        let old = [(config.clone(), b"old".to_vec()), (weights.clone(), b"old".to_vec())];
        let new = [(config.clone(), b"new".to_vec()), (weights.clone(), b"new".to_vec())];
        replace_all(&old).expect("written");
        // The temporary name for the third path is too long: nothing changes.
        let with_long_name = [&new[..], &[(folder.path().join("n".repeat(250)), Vec::new())]].concat();
        assert!(replace_all(&with_long_name).is_err());
        assert_eq!(fs::read(&config).expect("read"), b"old");
        assert_eq!(fs::read(&weights).expect("read"), b"old");
        // The first file cannot be replaced: the weights are already removed.
        fs::remove_file(&config).expect("removed");
        fs::create_dir(&config).expect("created");
        assert_eq!(replace_all(&new).expect_err("a folder").0, config);
        assert!(!weights.exists());
        assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 1, "nothing is left behind");
        fs::remove_dir(&config).expect("removed");
        replace_all(&new).expect("written");
        assert_eq!(fs::read(&config).expect("read"), b"new");
        assert_eq!(fs::read(&weights).expect("read"), b"new");
    }

    #[test]
    fn locks_that_are_links_or_pipes_are_refused() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let target = folder.path().join("notes");
        let link = folder.path().join(".lock");
        fs::write(&target, b"text").expect("written");
        std::os::unix::fs::symlink(&target, &link).expect("linked");
        assert!(open_lock(&link).is_err());
        assert_eq!(fs::read(&target).expect("read"), b"text");
        assert!(open_lock(&folder.path().join("other")).is_ok());
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
        assert!(open_lock(&pipe).is_err());
    }

    #[test]
    fn open_append_does_not_follow_links() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let target = folder.path().join("notes");
        let link = folder.path().join("rows.jsonl");
        std::os::unix::fs::symlink(&target, &link).expect("linked");
        assert!(open_append(&link).expect_err("a link").to_string().contains("symbolic link"));
        assert!(!target.exists());
        open_append(&target).and_then(|mut file| file.write_all(b"row")).expect("appended");
        assert_eq!(fs::read(&target).expect("read"), b"row");
    }

    #[test]
    fn threads_can_replace_the_same_file() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("f");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..25 {
                        replace(&path, b"same").expect("written");
                    }
                });
            }
        });
        assert_eq!(fs::read(&path).expect("read"), b"same");
    }
}
