//! Open files of shards: a bounded set for the whole process.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use rustix::process::{Resource, getrlimit};

use super::open::open_shard;
use crate::PipelineError;
use crate::identity::FileStamp;

/// Maximum number of files of shards that are open at a time, whatever the limit of the process.
const MAX_OPEN: usize = 1024;

/// Divisor of the process's limit of open files that gives the limit for shards.
const LIMIT_DIVISOR: usize = 4;

/// The open files of this process.
static HANDLES: LazyLock<Mutex<Handles>> = LazyLock::new(Mutex::default);

/// Number of the next shard to be opened.
static NEXT_SHARD: AtomicU64 = AtomicU64::new(0);

/// Open files by the number of their shard.
#[derive(Default)]
struct Handles {
    open: HashMap<u64, Handle>,
    /// Number of requests so far.
    n_requests: u64,
}

struct Handle {
    file: Arc<File>,
    /// Number of the last request for it.
    used: u64,
}

/// Returns a number that identifies a shard within this process.
pub(super) fn next_number() -> u64 {
    NEXT_SHARD.fetch_add(1, Ordering::Relaxed)
}

/// Returns the maximum number of files of shards that are open at a time.
pub(crate) fn max_open_files() -> usize {
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(files).unwrap_or(usize::MAX).saturating_div(LIMIT_DIVISOR).clamp(8, MAX_OPEN)
}

/// Returns the open file of shard `number`; opens it if it was closed, and closes the least
/// recently used files beyond [`max_open_files`].
///
/// # Errors
/// [`PipelineError::ShardMismatch`] if the file at `path` no longer has the bytes of the one with
/// `stamp`, and errors of [`open_shard`].
pub(super) fn file(number: u64, path: &Path, stamp: &FileStamp) -> Result<Arc<File>, PipelineError> {
    {
        let mut handles = HANDLES.lock().unwrap_or_else(PoisonError::into_inner);
        handles.n_requests += 1;
        let used = handles.n_requests;
        if let Some(handle) = handles.open.get_mut(&number) {
            handle.used = used;
            return Ok(Arc::clone(&handle.file));
        }
    }
    // Opening a file on a network may take long: the lock is released for other shards.
    let file = Arc::new(open_shard(path)?);
    let metadata = file.metadata().map_err(|error| PipelineError::io("open", path, error))?;
    if !FileStamp::from_metadata(&metadata).has_bytes_of(stamp) {
        let reason = "it was changed or replaced since this command opened it".into();
        return Err(PipelineError::ShardMismatch { shard: path.display().to_string(), reason });
    }
    keep(number, Arc::clone(&file));
    Ok(file)
}

/// Keeps `file` open as the file of shard `number`.
pub(super) fn keep(number: u64, file: Arc<File>) {
    let mut handles = HANDLES.lock().unwrap_or_else(PoisonError::into_inner);
    let max_open = max_open_files();
    while handles.open.len() >= max_open {
        let oldest = handles.open.iter().min_by_key(|(_, handle)| handle.used).map(|(number, _)| *number);
        let Some(oldest) = oldest else { break };
        handles.open.remove(&oldest);
    }
    let used = handles.n_requests;
    handles.open.insert(number, Handle { file, used });
}

/// Closes the file of shard `number`.
pub(super) fn close(number: u64) {
    HANDLES.lock().unwrap_or_else(PoisonError::into_inner).open.remove(&number);
}
