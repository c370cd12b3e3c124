//! A bounded folder of whole shards, shared by threads and processes.
//!
//! A shard is written as `<name>.part` under a lock and renamed when it is whole, so that a file with
//! its name is one. When room is needed the shards that were longest unused go. Indices stay: they
//! are small, and a run that starts again needs all of them.

use std::collections::HashMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use xxhash_rust::xxh3::Xxh3;

use crate::PipelineError;
use crate::remote::Sink;

/// How often a shard in use says so to other processes.
const TOUCH_EVERY: Duration = Duration::from_secs(1);

/// Room that is made at a time for what does not say how long it is.
const STEP_BYTES: u64 = 64 << 20;

/// The cache.
#[derive(Debug)]
pub(crate) struct Cache {
    folder: PathBuf,
    max_bytes: u64,
    slots: Mutex<HashMap<String, Arc<Slot>>>,
    /// Held while room is made, so that two threads do not clear for the same bytes.
    clearing: Mutex<()>,
    /// Fetches that may still start.
    permits: Mutex<usize>,
    returned: Condvar,
}

/// A shard of the cache, as this process knows it. Locked while it is fetched: whoever needs it too
/// waits.
type Slot = Mutex<Option<Held>>;

#[derive(Debug)]
struct Held {
    file: Arc<File>,
    touched: Instant,
}

/// A shard that is being written into the cache.
pub(crate) struct Filling<'a> {
    cache: &'a Cache,
    part: PathBuf,
    file: File,
    hash: Xxh3,
    len_bytes: u64,
    /// Bytes that room was made for.
    reserved_bytes: u64,
}

impl Cache {
    pub(crate) fn new(folder: PathBuf, max_bytes: u64, n_fetches: usize) -> Self {
        Self {
            folder,
            max_bytes,
            slots: Mutex::default(),
            clearing: Mutex::default(),
            permits: Mutex::new(n_fetches.max(1)),
            returned: Condvar::new(),
        }
    }

    /// Bytes that it may hold.
    pub(crate) fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// Where the shard `name` stands when it is there.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Makes the folder, where indices are kept too.
    pub(crate) fn create(&self) -> Result<(), PipelineError> {
        fs::create_dir_all(&self.folder).map_err(|e| PipelineError::io("create folder", &self.folder, e))
    }

    /// The shard `name`, by `fill` if it is not there. One that has not `expected_bytes` is fetched
    /// again: a machine that lost its power leaves such files.
    pub(crate) fn file(
        &self,
        name: &str,
        expected_bytes: Option<u64>,
        fill: impl FnOnce(&mut Filling<'_>) -> Result<(), PipelineError>,
    ) -> Result<Arc<File>, PipelineError> {
        let slot = Arc::clone(lock(&self.slots).entry(name.to_string()).or_default());
        let mut held = lock(&slot);
        if let Some(shard) = held.as_mut()
            && shard.still_there(&self.path(name))
        {
            return Ok(Arc::clone(&shard.file));
        }
        // Room is made for what is to come, not kept by what is gone.
        *held = None;
        let file = match self.open_whole(name, expected_bytes)? {
            Some(file) => file,
            None => self.fetch(name, expected_bytes, fill)?,
        };
        let file = Arc::new(file);
        *held = Some(Held { file: Arc::clone(&file), touched: Instant::now() });
        Ok(file)
    }

    fn open_whole(&self, name: &str, expected_bytes: Option<u64>) -> Result<Option<File>, PipelineError> {
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
        // Where the time cannot be set, as on a folder of someone else, the oldest goes first.
        let _ = file.set_modified(SystemTime::now());
        Ok(Some(file))
    }

    fn fetch(
        &self,
        name: &str,
        expected_bytes: Option<u64>,
        fill: impl FnOnce(&mut Filling<'_>) -> Result<(), PipelineError>,
    ) -> Result<File, PipelineError> {
        self.create()?;
        let _permit = Permit::take(self);
        let path = self.path(name);
        let part = self.folder.join(format!("{name}.part"));
        let file = lock_part(&part).map_err(|error| PipelineError::io("write", &part, error))?;
        // Another process may have fetched it while this one waited for the lock.
        if let Some(there) = self.open_whole(name, expected_bytes)? {
            let _ = fs::remove_file(&part);
            return Ok(there);
        }
        let mut filling = Filling {
            cache: self,
            part: part.clone(),
            file,
            hash: Xxh3::new(),
            len_bytes: 0,
            reserved_bytes: 0,
        };
        let filled = fill(&mut filling).and_then(|()| filling.finish(&path));
        if filled.is_err() {
            let _ = fs::remove_file(&part);
        }
        filled?;
        File::open(&path).map_err(|error| PipelineError::io("open", &path, error))
    }

    /// Removes what was longest unused until `wanted_bytes` more fit. `part` is not counted.
    fn make_room(&self, wanted_bytes: u64, part: &Path) -> io::Result<()> {
        if wanted_bytes > self.max_bytes {
            let (needed_bytes, max_bytes) = (wanted_bytes, self.max_bytes);
            return Err(io::Error::other(PipelineError::CacheTooSmall { needed_bytes, max_bytes }));
        }
        let _clearing = lock(&self.clearing);
        let mut shards = Vec::new();
        let mut sum_bytes = wanted_bytes;
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            // Another process may remove what it lists.
            let Ok(meta) = fs::metadata(&path) else { continue };
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("tar") => shards.push((meta.modified()?, meta.len(), path)),
                Some("part") if path != part && !remove_if_abandoned(&path) => {}
                _ => continue,
            }
            sum_bytes += meta.len();
        }
        shards.sort();
        for (_, len_bytes, path) in shards {
            if sum_bytes <= self.max_bytes {
                break;
            }
            // One that is read just now stays readable through its handle.
            match fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => sum_bytes -= len_bytes,
            }
        }
        // What others are fetching cannot be removed. It may stand beside this for as long as it takes.
        Ok(())
    }
}

impl Held {
    /// Whether the file still has its name, looked up now and then; says that it is in use.
    fn still_there(&mut self, path: &Path) -> bool {
        if self.touched.elapsed() < TOUCH_EVERY {
            return true;
        }
        self.touched = Instant::now();
        let _ = self.file.set_modified(SystemTime::now());
        matches!((self.file.metadata(), fs::metadata(path)), (Ok(a), Ok(b)) if a.ino() == b.ino())
    }
}

impl Filling<'_> {
    /// Length and XXH3-64 of what was written.
    pub(crate) fn written(&self) -> (u64, u64) {
        (self.len_bytes, self.hash.digest())
    }

    fn finish(&mut self, path: &Path) -> Result<(), PipelineError> {
        let io = |error| PipelineError::io("write", path, error);
        self.file.set_len(self.len_bytes).map_err(io)?;
        fs::rename(&self.part, path).map_err(io)
    }
}

impl Sink for Filling<'_> {
    fn restart(&mut self, total_bytes: Option<u64>) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.rewind()?;
        (self.hash, self.len_bytes) = (Xxh3::new(), 0);
        self.reserved_bytes = total_bytes.unwrap_or(0);
        self.cache.make_room(self.reserved_bytes, &self.part)?;
        // The length is there at once, so that other processes count it.
        self.file.set_len(self.reserved_bytes)
    }
}

impl Write for Filling<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let end_bytes = self.len_bytes + bytes.len() as u64;
        if end_bytes > self.reserved_bytes {
            self.reserved_bytes = end_bytes + STEP_BYTES.min(self.cache.max_bytes.saturating_sub(end_bytes));
            self.cache.make_room(self.reserved_bytes, &self.part)?;
        }
        self.file.write_all(bytes)?;
        self.hash.update(bytes);
        self.len_bytes = end_bytes;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// One of the fetches that may run at a time.
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

/// Opens and locks a partial file; waits while another process writes it. What it holds is void.
fn lock_part(part: &Path) -> io::Result<File> {
    loop {
        let file = File::options().create(true).write(true).truncate(false).open(part)?;
        match file.lock() {
            // A file system without locks has one process for each cache, one hopes.
            Err(error) if error.kind() == ErrorKind::Unsupported => return Ok(file),
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
fn remove_if_abandoned(part: &Path) -> bool {
    let Ok(file) = File::options().write(true).open(part) else { return false };
    match file.try_lock() {
        Ok(()) => fs::remove_file(part).is_ok(),
        Err(TryLockError::WouldBlock | TryLockError::Error(_)) => false,
    }
}

/// Locks; what these locks guard stays valid if a holder panics.
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

    /// `name`, which is `len` times its number, fetched or not.
    fn get(cache: &Cache, number: u8, len: usize, fetched: &AtomicUsize) -> Vec<u8> {
        let name = format!("{number}.tar");
        let fill = |filling: &mut Filling<'_>| {
            fetched.fetch_add(1, Ordering::SeqCst);
            let io = |error| PipelineError::io("write", Path::new("test"), error);
            filling.restart(Some(len as u64)).map_err(io)?;
            filling.write_all(&vec![number; len]).map_err(io)
        };
        let mut bytes = Vec::new();
        let file = cache.file(&name, Some(len as u64), fill).expect("fetched");
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
            .open(cache.path("2.tar"))
            .and_then(|f| f.set_modified(old))
            .expect("aged");
        get(&cache, 3, 100, &fetched);
        assert_eq!(names(&cache), ["1.tar", "3.tar"]);
        let too_large = cache.file("4.tar", None, |filling| {
            filling.restart(Some(251)).map_err(|e| PipelineError::io("write", Path::new("test"), e))
        });
        assert!(too_large.is_err());
        assert_eq!(names(&cache), ["1.tar", "3.tar"], "nothing was removed for what does not fit");
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

    /// A partial file of a process that was killed, and a whole one of another length.
    #[test]
    fn what_a_crash_left_is_replaced() {
        let (_folder, cache) = cache(1000);
        cache.create().expect("folder");
        fs::write(cache.path("1.tar"), b"short").expect("written");
        fs::write(cache.path("1.tar.part"), b"half").expect("written");
        fs::write(cache.path("9.tar.part"), b"abandoned").expect("written");
        let fetched = AtomicUsize::new(0);
        assert_eq!(get(&cache, 1, 300, &fetched), vec![1; 300]);
        assert_eq!(names(&cache), ["1.tar"]);
    }

    #[test]
    fn a_failed_fetch_leaves_nothing() {
        let (_folder, cache) = cache(1000);
        let failed = cache.file("1.tar", None, |filling| {
            filling.write_all(b"half").map_err(|e| PipelineError::io("write", Path::new("test"), e))?;
            Err(PipelineError::MissingShard { path: "x".into() })
        });
        assert!(failed.is_err());
        assert!(names(&cache).is_empty());
    }
}
