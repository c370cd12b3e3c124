//! Identity of data: whether a file, a shard or a folder is unchanged since an earlier run.
//!
//! Shards are the same if their bytes are. The hash of a shard's bytes is taken from its index if
//! the index was written after the last change of the file, and is otherwise computed once and kept
//! for this state of the file. Images in a folder are the same if the file system states the same
//! about their files ([`FileStamp`]). Reading all of them would cost as much as using them.
//!
//! Whatever is kept between commands, such as features, indices and parts of jobs, is keyed by
//! these hashes.

use std::fmt;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime};

/// Age below which a change of a file may have the same time as a later change: the times of file
/// systems have a resolution of some milliseconds.
const SETTLED_AFTER: Duration = Duration::from_millis(100);

/// State of a file, as the file system describes it. Different files have different stamps. The
/// stamp of a file changes when it is written, replaced or given another time, but not when its
/// folder is renamed. The device is not part of it: machines number their mounts differently, and
/// the time of the last change, in nanoseconds, distinguishes files with the same inode number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileStamp {
    inode: u64,
    len_bytes: u64,
    /// Time of the last change of the bytes, in nanoseconds since 1970; users can set it.
    modified_ns: i128,
    /// Time of the last change of the bytes or of the metadata; users cannot set it.
    changed_ns: i128,
}

impl FileStamp {
    /// Creates the stamp of the file with this metadata.
    pub fn from_metadata(metadata: &Metadata) -> Self {
        Self {
            inode: metadata.ino(),
            len_bytes: metadata.len(),
            modified_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
            changed_ns: nanoseconds(metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Returns the length of the file, in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Returns whether the last change of the file is not later than that of `other`.
    pub fn is_no_newer_than(&self, other: &Self) -> bool {
        self.changed_ns <= other.changed_ns
    }

    /// Returns whether the length and the time of the last change of the bytes are those of
    /// `other`. Permissions, owners and links may differ.
    pub fn has_bytes_of(&self, other: &Self) -> bool {
        self.len_bytes == other.len_bytes && self.modified_ns == other.modified_ns
    }

    /// Returns whether the last change is old enough that a later change is sure to have another
    /// time.
    pub fn is_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.changed_ns + SETTLED_AFTER.as_nanos() as i128 <= now.as_nanos() as i128
    }
}

/// Formats the stamp; equal texts are equal stamps.
impl fmt::Display for FileStamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { inode, len_bytes, modified_ns, changed_ns } = self;
        write!(f, "{inode} {len_bytes} {modified_ns} {changed_ns}")
    }
}

/// Returns a time in nanoseconds since 1970.
fn nanoseconds(seconds: i64, nanoseconds: i64) -> i128 {
    i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds)
}
