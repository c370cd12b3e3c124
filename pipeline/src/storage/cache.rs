//! A bounded folder of whole shards, shared by threads and processes.
//!
//! A shard is written as `<name>.part` under a lock and renamed when it is complete, so that a file
//! with the name of a shard is complete. When room is needed, the least recently used shards are
//! removed and the handles on them closed, since an open handle keeps the bytes on the disk.
//! Indices are kept: they are small, and a restarted run needs all of them. Files without the name
//! of a cached shard are never changed. The lock also makes the processes of a machine fetch a
//! shard only once. Disk blocks are allocated before bytes arrive, and fetches that do not fit
//! together wait for one another.

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
use crate::shard::handles::max_open_files;

/// Interval at which the modification time of a shard in use is updated, which shows other
/// processes that it is in use.
const TOUCH_INTERVAL: Duration = Duration::from_secs(1);

/// Interval at which a fetch that waits for room checks for it.
const SPACE_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Number of bytes that are reserved at a time for a stream of unknown length.
const RESERVE_STEP_BYTES: u64 = 64 << 20;

/// A bounded folder of whole shards.
#[derive(Debug)]
pub(crate) struct Cache {
    folder: PathBuf,
    max_bytes: u64,
    slots: Mutex<HashMap<String, Arc<Slot>>>,
    /// Held while shards are evicted, so that two threads do not claim the same bytes.
    eviction_lock: Mutex<()>,
    /// Number of further fetches that may start.
    permits: Mutex<usize>,
    permit_returned: Condvar,
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
    /// Number of bytes that are reserved for the shard.
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
            permit_returned: Condvar::new(),
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

    /// Creates the folder of the shards and indices.
    pub(crate) fn create(&self) -> Result<(), PipelineError> {
        fs::create_dir_all(&self.folder).map_err(|e| PipelineError::io("create folder", &self.folder, e))
    }

    /// Returns the shard `name`, written by `fill` if the cache does not have it. A file whose
    /// length is not `expected_bytes` is fetched again: a power failure leaves such files.
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
        // The handle is closed first, because it may keep the bytes of a removed file on the disk.
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

    /// Closes the least recently used handles, so that a process with many shards does not exceed
    /// its limit of open files.
    fn close_oldest(&self) {
        let slots: Vec<Arc<Slot>> = lock(&self.slots).values().cloned().collect();
        if slots.len() <= max_open_files() {
            return;
        }
        let mut open: Vec<(Instant, &Arc<Slot>)> = Vec::new();
        for slot in &slots {
            // A locked slot is being fetched or checked.
            let Ok(held) = slot.try_lock() else { continue };
            open.extend(held.as_ref().map(|held| (held.touched, slot)));
        }
        let n_closed = open.len().saturating_sub(max_open_files());
        open.sort_by_key(|(touched, _)| *touched);
        for (_, slot) in open.into_iter().take(n_closed) {
            if let Ok(mut held) = slot.try_lock() {
                *held = None;
            }
        }
    }

    /// Closes a handle that failed, so that the next reader opens the shard again. A handle that
    /// another thread has opened in the meantime is kept.
    pub(crate) fn close(&self, name: &str, failed: &Arc<File>) {
        // The map must not be locked while this thread waits for the slot: the thread that fetches
        // into the slot needs the map.
        let slot = lock(&self.slots).get(name).cloned();
        if let Some(slot) = slot {
            lock(&slot).take_if(|held| Arc::ptr_eq(&held.file, failed));
        }
    }

    fn open_complete(&self, name: &str, expected_bytes: Option<u64>) -> Result<Option<File>, PipelineError> {
        let path = self.path(name);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(PipelineError::io("open", &path, error)),
        };
        if let Some(expected) = expected_bytes
            && file.metadata().is_ok_and(|metadata| metadata.len() != expected)
        {
            fs::remove_file(&path).map_err(|error| PipelineError::io("remove", &path, error))?;
            return Ok(None);
        }
        // If the time cannot be set, as in another user's folder, files are evicted by their age.
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
        let _permit = Permit::acquire(self);
        let path = self.path(name);
        let part = self.folder.join(format!("{name}.part"));
        let file = lock_part(&part).map_err(|error| PipelineError::io("write", &part, error))?;
        // Another process may have fetched it while this one waited for the lock.
        if let Some(complete) = self.open_complete(name, expected_bytes)? {
            let _ = fs::remove_file(&part);
            return Ok(complete);
        }
        let mut partial = PartialShard {
            cache: self,
            part: part.clone(),
            file,
            hash: Xxh3::new(),
            len_bytes: 0,
            reserved_bytes: 0,
            length_known: false,
        };
        let result = fill(&mut partial).and_then(|()| partial.finish(&path));
        if result.is_err() {
            let _ = fs::remove_file(&part);
        }
        result?;
        // The handle is kept, because another process may remove the file at once; the lock is no
        // longer needed.
        let _ = partial.file.unlock();
        Ok(partial.file)
    }

    /// Sets the length of `file` and makes room for it in the cache and on the disk. If other
    /// fetches leave no room, waits if `may_wait`: fetches that have their room will finish.
    fn reserve(&self, file: &File, len_bytes: u64, part: &Path, may_wait: bool) -> io::Result<()> {
        loop {
            let eviction_lock = lock(&self.eviction_lock);
            let fits = self.evict(len_bytes, part)?;
            if fits || !may_wait {
                match allocate(file, len_bytes) {
                    // The disk may be smaller than the limit of the cache.
                    Err(error) if error.kind() == ErrorKind::StorageFull => {
                        let (shards, parts_bytes) = self.list(part)?;
                        let is_removed = shards.iter().any(|shard| fs::remove_file(&shard.path).is_ok());
                        self.close_removed();
                        if is_removed {
                            continue;
                        }
                        if !may_wait || parts_bytes == 0 {
                            return Err(error);
                        }
                        file.set_len(0)?;
                    }
                    result => return result,
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
        let room_bytes = self.max_bytes - wanted_bytes;
        for shard in shards {
            if sum_bytes <= room_bytes {
                break;
            }
            // Files that cannot be removed, such as another user's, are skipped.
            if fs::remove_file(&shard.path).is_ok() {
                sum_bytes -= shard.len_bytes;
            }
        }
        self.close_removed();
        Ok(sum_bytes <= room_bytes)
    }

    /// Returns the shards of the folder, the least recently used first, and the bytes of partial
    /// files other than `part`.
    fn list(&self, part: &Path) -> io::Result<(Vec<CachedFile>, u64)> {
        let mut shards = Vec::new();
        let mut parts_bytes = 0;
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            // Another process may have removed the file.
            let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
            if !metadata.is_file() || !has_cache_name(&path) {
                continue;
            }
            let len_bytes = metadata.len();
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("tar") => shards.push(CachedFile { used: metadata.modified()?, len_bytes, path }),
                Some("part") if path != part && !remove_if_abandoned(&path) => parts_bytes += len_bytes,
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
            let Some(shard) = held.as_ref() else { continue };
            let is_removed = shard.file.metadata().is_ok_and(|metadata| metadata.nlink() == 0);
            if is_removed {
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
    /// Returns whether the file still has its name. Checks that and marks the file as in use once
    /// every [`TOUCH_INTERVAL`].
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
    pub(crate) fn is_complete_tar(&self) -> bool {
        if self.length_known {
            return true;
        }
        let mut end = [1; 1024];
        let Some(start) = self.len_bytes.checked_sub(end.len() as u64) else { return false };
        self.file.read_exact_at(&mut end, start).is_ok() && end == [0; 1024]
    }

    fn finish(&mut self, path: &Path) -> Result<(), PipelineError> {
        self.sync_and_rename(path).map_err(|error| PipelineError::io("write", path, error))
    }

    fn sync_and_rename(&mut self, path: &Path) -> io::Result<()> {
        self.file.set_len(self.len_bytes)?;
        // A power failure must not leave a shard of zeros under its name.
        self.file.sync_data()?;
        fs::rename(&self.part, path)
    }

    fn reserve(&mut self, len_bytes: u64, may_wait: bool) -> io::Result<()> {
        self.reserved_bytes = len_bytes;
        let result = self.cache.reserve(&self.file, len_bytes, &self.part, may_wait);
        result.map_err(|error| match error.kind() {
            ErrorKind::StorageFull => io::Error::other(PipelineError::io("write", &self.part, error)),
            _ => error,
        })
    }
}

impl Sink for PartialShard<'_> {
    fn restart(&mut self, total_bytes: Option<u64>) -> io::Result<()> {
        self.file.set_len(0)?;
        self.hash = Xxh3::new();
        self.len_bytes = 0;
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
    /// Waits until a permit is free, and takes it.
    fn acquire(cache: &'a Cache) -> Self {
        let mut permits = lock(&cache.permits);
        while *permits == 0 {
            permits = cache.permit_returned.wait(permits).unwrap_or_else(PoisonError::into_inner);
        }
        *permits -= 1;
        Self(cache)
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        *lock(&self.0.permits) += 1;
        self.0.permit_returned.notify_one();
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

    fn write_error(error: io::Error) -> PipelineError {
        PipelineError::io("write", Path::new("test"), error)
    }

    /// Returns the bytes of shard `number`, which are `len` times that number; counts fetches in
    /// `fetched`.
    fn get(cache: &Cache, number: u8, len: usize, fetched: &AtomicUsize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let file = cache
            .file(&name(number), Some(len as u64), |partial| {
                fetched.fetch_add(1, Ordering::SeqCst);
                partial.restart(Some(len as u64)).map_err(write_error)?;
                partial.write_all(&vec![number; len]).map_err(write_error)
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
    fn least_recently_used_shard_is_evicted() {
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
        assert_eq!(n_open(&cache), 2, "removed files are closed, which frees their bytes");
        let too_large = cache.file(&name(4), None, |partial| partial.restart(Some(251)).map_err(write_error));
        assert!(too_large.is_err());
        assert_eq!(names(&cache), [name(1), name(3)], "nothing is removed for a shard that cannot fit");
    }

    #[test]
    fn concurrent_requests_for_a_shard_fetch_it_once() {
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
    fn files_left_by_a_crash_are_replaced() {
        let (_folder, cache) = cache(1000);
        cache.create().expect("folder");
        fs::write(cache.path(&name(1)), b"short").expect("written");
        fs::write(cache.path(&format!("{}.part", name(1))), b"half").expect("written");
        fs::write(cache.path(&format!("{}.part", name(9))), b"abandoned").expect("written");
        let fetched = AtomicUsize::new(0);
        assert_eq!(get(&cache, 1, 300, &fetched), vec![1; 300]);
        assert_eq!(names(&cache), [name(1)]);
    }

    /// Threads close handles while others fetch, without a deadlock.
    #[test]
    fn handles_can_be_closed_during_fetches() {
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
                        let file = cache.file(&name(number), Some(100), |partial| {
                            partial.restart(Some(100)).map_err(write_error)
                        });
                        cache.close(&name(number), &file.expect("cached or fetched"));
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
        let mut total_bytes = 0;
        for name in names(&cache) {
            total_bytes += fs::metadata(cache.path(&name)).expect("metadata").len();
        }
        assert!(total_bytes <= 250, "{total_bytes} bytes");
    }

    #[test]
    fn unrelated_files_in_the_folder_are_not_removed() {
        let (_folder, cache) = cache(150);
        cache.create().expect("folder");
        let unrelated = ["imagenet-000000.tar", "movie.part", "0123456789abcdef-x.txt"];
        for name in unrelated {
            fs::write(cache.path(name), vec![0; 1000]).expect("written");
        }
        fs::create_dir(cache.path("0123456789abcdef-folder.tar")).expect("created");
        let fetched = AtomicUsize::new(0);
        get(&cache, 1, 100, &fetched);
        get(&cache, 2, 100, &fetched);
        assert!(unrelated.iter().all(|name| cache.path(name).exists()), "{:?}", names(&cache));
        assert!(!cache.path(&name(1)).exists() && cache.path(&name(2)).exists());
    }

    #[test]
    fn failed_fetch_leaves_no_file() {
        let (_folder, cache) = cache(1000);
        let result = cache.file(&name(1), None, |partial| {
            partial.write_all(b"half").map_err(write_error)?;
            Err(PipelineError::MissingShard { path: "x".into() })
        });
        assert!(result.is_err());
        assert!(names(&cache).is_empty());
    }
}
