//! A bounded folder of whole shards, shared by threads and processes.
//!
//! A shard is written as `<name>.part` under a lock and renamed when it is complete, so that a file
//! with the name of a shard is complete. When room is needed, the least recently used shards are
//! removed and the handles on them closed, since an open handle keeps the bytes on the disk.
//! Indices are kept: they are small, and a run that restarts needs all of them. Files without the
//! name of a cached shard are never touched.

use std::collections::HashMap;
use std::fs;
use std::fs::File;
use std::io;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use xxhash_rust::xxh3::Xxh3;

use super::part::{allocate, lock_part, remove_if_abandoned};
use crate::PipelineError;
use crate::remote::Sink;
use crate::shard::handles::limit;

/// Interval at which the modification time of a shard in use is updated, for other processes to
/// see.
const TOUCH_INTERVAL: Duration = Duration::from_secs(1);

/// Interval at which a fetch that waits for room checks for it.
const SPACE_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Room that is made at a time for a stream of unknown length, in bytes.
const RESERVE_STEP_BYTES: u64 = 64 << 20;

/// A bounded folder of whole shards.
#[derive(Debug)]
pub(crate) struct Cache {
    folder: PathBuf,
    max_bytes: u64,
    slots: Mutex<HashMap<String, Arc<Slot>>>,
    /// Held while room is made, so that two threads do not claim the same bytes.
    eviction_lock: Mutex<()>,
    /// Number of further fetches that may start.
    permits: Mutex<usize>,
    returned: Condvar,
}

/// Handle on a shard of the cache, if this process has one. Locked while the shard is fetched:
/// other threads that need it wait.
type Slot = Mutex<Option<OpenShard>>;

#[derive(Debug)]
struct OpenShard {
    file: Arc<File>,
    touched: Instant,
}

/// A shard in the folder. Ordered by the time of its last use.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct CachedFile {
    used: SystemTime,
    len_bytes: u64,
    path: PathBuf,
}

/// A shard that is being written into the cache.
pub(crate) struct PartialShard<'a> {
    cache: &'a Cache,
    part: PathBuf,
    file: File,
    hash: Xxh3,
    len_bytes: u64,
    /// Number of bytes that room was made for.
    reserved_bytes: u64,
    /// `true` if the length was known before the first byte.
    length_known: bool,
}

impl Cache {
    pub(crate) fn new(folder: PathBuf, max_bytes: u64, n_fetches: usize) -> Self {
        Self {
            folder,
            max_bytes,
            slots: Mutex::default(),
            eviction_lock: Mutex::default(),
            permits: Mutex::new(n_fetches.max(1)),
            returned: Condvar::new(),
        }
    }

    /// Returns the size limit of the shards, in bytes.
    pub(crate) fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// Returns the path of the shard `name`, whether it exists or not.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Creates the folder, which holds indices too.
    pub(crate) fn create(&self) -> Result<(), PipelineError> {
        fs::create_dir_all(&self.folder).map_err(|e| PipelineError::io("create folder", &self.folder, e))
    }

    /// Returns the shard `name`, written by `fill` if it is not there. A file that does not have
    /// `expected_bytes` is fetched again: a power failure leaves such files.
    pub(crate) fn file(
        &self,
        name: &str,
        expected_bytes: Option<u64>,
        fill: impl FnOnce(&mut PartialShard<'_>) -> Result<(), PipelineError>,
    ) -> Result<Arc<File>, PipelineError> {
        let slot = Arc::clone(lock(&self.slots).entry(name.to_string()).or_default());
        let mut held = lock(&slot);
        if let Some(shard) = held.as_mut()
            && shard.is_current(&self.path(name))
        {
            return Ok(Arc::clone(&shard.file));
        }
        // The handle is closed first, because it may keep the room of a removed file.
        *held = None;
        let file = match self.open_complete(name, expected_bytes)? {
            Some(file) => file,
            None => self.fetch(name, expected_bytes, fill)?,
        };
        let file = Arc::new(file);
        *held = Some(OpenShard { file: Arc::clone(&file), touched: Instant::now() });
        drop(held);
        self.close_oldest();
        Ok(file)
    }

    /// Closes the handles that were not used for longest, so that a process with many shards does
    /// not open more files than it may.
    fn close_oldest(&self) {
        let slots: Vec<Arc<Slot>> = lock(&self.slots).values().cloned().collect();
        if slots.len() <= limit() {
            return;
        }
        let mut open: Vec<(Instant, &Arc<Slot>)> = Vec::new();
        for slot in &slots {
            // A locked slot is being fetched or checked.
            let Ok(held) = slot.try_lock() else { continue };
            open.extend(held.as_ref().map(|held| (held.touched, slot)));
        }
        let n_closed = open.len().saturating_sub(limit());
        open.sort_by_key(|(touched, _)| *touched);
        for (_, slot) in open.into_iter().take(n_closed) {
            if let Ok(mut held) = slot.try_lock() {
                *held = None;
            }
        }
    }

    /// Closes a handle that failed, so that the next reader opens the shard again. A handle that
    /// another thread has opened since is kept.
    pub(crate) fn close(&self, name: &str, failed: &Arc<File>) {
        // The map must not stay locked while the slot is waited for: the thread that fetches into
        // it needs the map.
        let slot = lock(&self.slots).get(name).cloned();
        if let Some(slot) = slot {
            lock(&slot).take_if(|held| Arc::ptr_eq(&held.file, failed));
        }
    }

    fn open_complete(&self, name: &str, expected_bytes: Option<u64>) -> Result<Option<File>, PipelineError> {
        let path = self.path(name);
        let io = |error| PipelineError::io("open", &path, error);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io(error)),
        };
        if expected_bytes.is_some_and(|expected| file.metadata().is_ok_and(|meta| meta.len() != expected)) {
            fs::remove_file(&path).map_err(|error| PipelineError::io("remove", &path, error))?;
            return Ok(None);
        }
        // If the time cannot be set, as in another user's folder, the oldest file is removed first.
        let _ = file.set_modified(SystemTime::now());
        Ok(Some(file))
    }

    fn fetch(
        &self,
        name: &str,
        expected_bytes: Option<u64>,
        fill: impl FnOnce(&mut PartialShard<'_>) -> Result<(), PipelineError>,
    ) -> Result<File, PipelineError> {
        self.create()?;
        let _permit = Permit::take(self);
        let path = self.path(name);
        let part = self.folder.join(format!("{name}.part"));
        let file = lock_part(&part).map_err(|error| PipelineError::io("write", &part, error))?;
        // Another process may have fetched it while this one waited for the lock.
        if let Some(there) = self.open_complete(name, expected_bytes)? {
            let _ = fs::remove_file(&part);
            return Ok(there);
        }
        let mut filling = PartialShard {
            cache: self,
            part: part.clone(),
            file,
            hash: Xxh3::new(),
            len_bytes: 0,
            reserved_bytes: 0,
            length_known: false,
        };
        let filled = fill(&mut filling).and_then(|()| filling.finish(&path));
        if filled.is_err() {
            let _ = fs::remove_file(&part);
        }
        filled?;
        // The handle is kept, because another process may remove the file at once; the lock is no
        // longer needed.
        let _ = filling.file.unlock();
        Ok(filling.file)
    }

    /// Sets the length of `file`, with room in the cache and on the disk. If other fetches leave no
    /// room, waits if `may_wait`: fetches that have their room finish.
    fn reserve(&self, file: &File, len_bytes: u64, part: &Path, may_wait: bool) -> io::Result<()> {
        loop {
            let eviction_lock = lock(&self.eviction_lock);
            let fits = self.evict(len_bytes, part)?;
            if fits || !may_wait {
                match allocate(file, len_bytes) {
                    // The disk may be smaller than the limit of the cache.
                    Err(error) if error.kind() == ErrorKind::StorageFull => {
                        let (shards, parts_bytes) = self.list(part)?;
                        let removed = shards.iter().any(|shard| fs::remove_file(&shard.path).is_ok());
                        self.close_removed();
                        if removed {
                            continue;
                        }
                        if !may_wait || parts_bytes == 0 {
                            return Err(error);
                        }
                        file.set_len(0)?;
                    }
                    allocated => return allocated,
                }
            }
            drop(eviction_lock);
            std::thread::sleep(SPACE_POLL_INTERVAL);
        }
    }

    /// Removes the least recently used shards until `wanted_bytes` more fit. `part` is not counted.
    /// Returns `false` if other fetches leave no room. The caller holds `eviction_lock`.
    fn evict(&self, wanted_bytes: u64, part: &Path) -> io::Result<bool> {
        if wanted_bytes > self.max_bytes {
            let needed_bytes = wanted_bytes;
            let max_bytes = self.max_bytes;
            return Err(io::Error::other(PipelineError::CacheTooSmall { needed_bytes, max_bytes }));
        }
        let (shards, parts_bytes) = self.list(part)?;
        let mut sum_bytes = shards.iter().map(|shard| shard.len_bytes).sum::<u64>() + parts_bytes;
        let fits = |sum_bytes: u64| sum_bytes.saturating_add(wanted_bytes) <= self.max_bytes;
        for shard in shards {
            if fits(sum_bytes) {
                break;
            }
            // Files that cannot be removed, such as another user's, are skipped.
            if fs::remove_file(&shard.path).is_ok() {
                sum_bytes -= shard.len_bytes;
            }
        }
        self.close_removed();
        Ok(fits(sum_bytes))
    }

    /// Returns the shards of the folder, the least recently used first, and the bytes of partial
    /// files other than `part`.
    fn list(&self, part: &Path) -> io::Result<(Vec<CachedFile>, u64)> {
        let mut shards = Vec::new();
        let mut parts_bytes = 0;
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            // Another process may remove what is listed here.
            let Ok(meta) = fs::symlink_metadata(&path) else { continue };
            if !meta.is_file() || !has_cache_name(&path) {
                continue;
            }
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("tar") => {
                    shards.push(CachedFile { used: meta.modified()?, len_bytes: meta.len(), path })
                }
                Some("part") if path != part && !remove_if_abandoned(&path) => parts_bytes += meta.len(),
                _ => {}
            }
        }
        shards.sort();
        Ok((shards, parts_bytes))
    }

    /// Closes the handles on shards whose files were removed, by this process or another.
    fn close_removed(&self) {
        for slot in lock(&self.slots).values() {
            // A locked slot is being fetched or checked.
            let Ok(mut held) = slot.try_lock() else { continue };
            let gone = held.as_ref().is_some_and(|held| held.file.metadata().is_ok_and(|m| m.nlink() == 0));
            if gone {
                *held = None;
            }
        }
    }
}

/// Returns whether a file has the name of a cached shard, which begins with 16 hexadecimal digits
/// and a dash.
fn has_cache_name(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    name.get(16) == Some(&b'-') && name[..16].iter().all(u8::is_ascii_hexdigit)
}

impl OpenShard {
    /// Returns whether the file still has its name, checked every [`TOUCH_INTERVAL`], and then
    /// marks it as in use.
    fn is_current(&mut self, path: &Path) -> bool {
        if self.touched.elapsed() < TOUCH_INTERVAL {
            return true;
        }
        self.touched = Instant::now();
        let _ = self.file.set_modified(SystemTime::now());
        matches!((self.file.metadata(), fs::metadata(path)), (Ok(a), Ok(b)) if a.ino() == b.ino())
    }
}

impl PartialShard<'_> {
    /// Returns the length and the XXH3-64 of the bytes written.
    pub(crate) fn written(&self) -> (u64, u64) {
        (self.len_bytes, self.hash.digest())
    }

    /// Returns whether the bytes are known to be a complete tar: by the length, which the fetch has
    /// checked, or by the two empty blocks at the end, which some writers leave out.
    pub(crate) fn is_whole_tar(&self) -> bool {
        let mut end = [1; 1024];
        let start = self.len_bytes.checked_sub(end.len() as u64);
        self.length_known
            || (start.is_some_and(|start| self.file.read_exact_at(&mut end, start).is_ok())
                && end == [0; 1024])
    }

    fn finish(&mut self, path: &Path) -> Result<(), PipelineError> {
        let io = |error| PipelineError::io("write", path, error);
        self.file.set_len(self.len_bytes).map_err(io)?;
        // A power failure must not leave a shard of zeros under its name.
        self.file.sync_data().map_err(io)?;
        fs::rename(&self.part, path).map_err(io)
    }

    fn reserve(&mut self, len_bytes: u64, may_wait: bool) -> io::Result<()> {
        self.reserved_bytes = len_bytes;
        let reserved = self.cache.reserve(&self.file, len_bytes, &self.part, may_wait);
        reserved.map_err(|error| match error.kind() {
            ErrorKind::StorageFull => io::Error::other(PipelineError::io("write", &self.part, error)),
            _ => error,
        })
    }
}

impl Sink for PartialShard<'_> {
    fn restart(&mut self, total_bytes: Option<u64>) -> io::Result<()> {
        self.file.set_len(0)?;
        (self.hash, self.len_bytes) = (Xxh3::new(), 0);
        self.length_known = total_bytes.is_some();
        self.reserve(total_bytes.unwrap_or(0), true)
    }
}

impl Write for PartialShard<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let end_bytes = self.len_bytes + bytes.len() as u64;
        if end_bytes > self.reserved_bytes {
            let step_bytes = RESERVE_STEP_BYTES.min(self.cache.max_bytes / 8);
            let more = step_bytes.min(self.cache.max_bytes.saturating_sub(end_bytes));
            // Two streams of unknown length must not wait for each other.
            self.reserve(end_bytes + more, false)?;
        }
        self.file.write_all_at(bytes, self.len_bytes)?;
        self.hash.update(bytes);
        self.len_bytes = end_bytes;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Permit for one of the fetches that may run at a time.
struct Permit<'a>(&'a Cache);

impl<'a> Permit<'a> {
    fn take(cache: &'a Cache) -> Self {
        let mut permits = lock(&cache.permits);
        while *permits == 0 {
            permits = cache.returned.wait(permits).unwrap_or_else(PoisonError::into_inner);
        }
        *permits -= 1;
        Self(cache)
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        *lock(&self.0.permits) += 1;
        self.0.returned.notify_one();
    }
}

/// Locks a mutex and ignores poisoning: the guarded data stays valid if a holder panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn cache(max_bytes: u64) -> (tempfile::TempDir, Cache) {
        let folder = tempfile::tempdir().expect("temporary folder");
        let cache = Cache::new(folder.path().join("cache"), max_bytes, 2);
        (folder, cache)
    }

    fn name(number: u8) -> String {
        format!("{number:016x}-s.tar")
    }

    /// Returns the bytes of shard `number`, which are `len` times that number, fetched or not.
    fn get(cache: &Cache, number: u8, len: usize, fetched: &AtomicUsize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let file = cache
            .file(&name(number), Some(len as u64), |filling| {
                fetched.fetch_add(1, Ordering::SeqCst);
                let io = |error| PipelineError::io("write", Path::new("test"), error);
                filling.restart(Some(len as u64)).map_err(io)?;
                filling.write_all(&vec![number; len]).map_err(io)
            })
            .expect("fetched");
        let mut file = File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&*file)))
            .expect("reopened");
        file.read_to_end(&mut bytes).expect("read");
        bytes
    }

    fn names(cache: &Cache) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(&cache.folder)
            .expect("listed")
            .map(|entry| entry.expect("entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// Counts the files of the cache that this process has open.
    fn n_open(cache: &Cache) -> usize {
        let open = fs::read_dir("/proc/self/fd").expect("listed").flatten();
        open.filter_map(|fd| fs::read_link(fd.path()).ok())
            .filter(|path| path.starts_with(&cache.folder))
            .count()
    }

    #[test]
    fn the_longest_unused_goes_when_room_is_needed() {
        let (_folder, cache) = cache(250);
        let fetched = AtomicUsize::new(0);
        for number in [1, 2, 1] {
            assert_eq!(get(&cache, number, 100, &fetched), vec![number; 100]);
        }
        assert_eq!(fetched.load(Ordering::SeqCst), 2);
        // 1 was fetched first, but used last.
        let old = SystemTime::now() - Duration::from_secs(60);
        File::options()
            .write(true)
            .open(cache.path(&name(2)))
            .and_then(|f| f.set_modified(old))
            .expect("aged");
        get(&cache, 3, 100, &fetched);
        assert_eq!(names(&cache), [name(1), name(3)]);
        assert_eq!(n_open(&cache), 2, "what is removed is closed, or its bytes would stay");
        let too_large = cache.file(&name(4), None, |filling| {
            filling.restart(Some(251)).map_err(|e| PipelineError::io("write", Path::new("test"), e))
        });
        assert!(too_large.is_err());
        assert_eq!(names(&cache), [name(1), name(3)], "nothing was removed for what does not fit");
    }

    #[test]
    fn threads_that_need_the_same_fetch_it_once() {
        let (_folder, cache) = cache(1000);
        let fetched = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert_eq!(get(&cache, 7, 500, &fetched).len(), 500));
            }
        });
        assert_eq!(fetched.load(Ordering::SeqCst), 1);
    }

    /// Partial files of a killed process, and a complete file of another length.
    #[test]
    fn what_a_crash_left_is_replaced() {
        let (_folder, cache) = cache(1000);
        cache.create().expect("folder");
        fs::write(cache.path(&name(1)), b"short").expect("written");
        fs::write(cache.path(&format!("{}.part", name(1))), b"half").expect("written");
        fs::write(cache.path(&format!("{}.part", name(9))), b"abandoned").expect("written");
        let fetched = AtomicUsize::new(0);
        assert_eq!(get(&cache, 1, 300, &fetched), vec![1; 300]);
        assert_eq!(names(&cache), [name(1)]);
    }

    /// Threads whose reads failed, while others fetch: none waits forever.
    #[test]
    fn handles_are_closed_while_others_fetch() {
        let (_folder, cache) = cache(350);
        let fetched = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let cache = &cache;
                let fetched = &fetched;
                scope.spawn(move || {
                    for round in 0..50 {
                        let number = (thread + round) % 5;
                        get(cache, number, 100, fetched);
                        let file = cache.file(&name(number), Some(100), |filling| {
                            filling.restart(Some(100)).map_err(|e| PipelineError::io("x", Path::new("x"), e))
                        });
                        cache.close(&name(number), &file.expect("there or fetched"));
                    }
                });
            }
        });
        assert!(names(&cache).len() <= 3, "{:?}", names(&cache));
    }

    /// Concurrent fetches that do not fit together: one waits for the other.
    #[test]
    fn fetches_wait_for_room() {
        let (_folder, cache) = cache(250);
        let fetched = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for number in 0..6 {
                let cache = &cache;
                let fetched = &fetched;
                scope.spawn(move || assert_eq!(get(cache, number, 100, fetched), vec![number; 100]));
            }
        });
        let held: u64 =
            names(&cache).iter().map(|name| fs::metadata(cache.path(name)).expect("there").len()).sum();
        assert!(held <= 250, "{held} bytes");
    }

    /// The folder of the cache holds other files.
    #[test]
    fn files_of_others_stay() {
        let (_folder, cache) = cache(150);
        cache.create().expect("folder");
        let theirs = ["imagenet-000000.tar", "movie.part", "0123456789abcdef-x.txt"];
        for name in theirs {
            fs::write(cache.path(name), vec![0; 1000]).expect("written");
        }
        fs::create_dir(cache.path("0123456789abcdef-folder.tar")).expect("created");
        let fetched = AtomicUsize::new(0);
        get(&cache, 1, 100, &fetched);
        get(&cache, 2, 100, &fetched);
        assert!(theirs.iter().all(|name| cache.path(name).exists()), "{:?}", names(&cache));
        assert!(!cache.path(&name(1)).exists() && cache.path(&name(2)).exists());
    }

    #[test]
    fn a_failed_fetch_leaves_nothing() {
        let (_folder, cache) = cache(1000);
        let failed = cache.file(&name(1), None, |filling| {
            filling.write_all(b"half").map_err(|e| PipelineError::io("write", Path::new("test"), e))?;
            Err(PipelineError::MissingShard { path: "x".into() })
        });
        assert!(failed.is_err());
        assert!(names(&cache).is_empty());
    }
}
