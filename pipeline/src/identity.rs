//! Identity of data: when a file, a shard or a folder is the one that was seen before.
//!
//! Shards are the same if their bytes are. The hash of a shard's bytes is taken from its index
//! where the index was written after the last change of the file, and is otherwise computed once
//! and kept for this state of the file. Images in a folder are the same if their files are the same
//! and unchanged, which is a matter of the file system ([`FileStamp`]).

use std::fmt;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime};

/// Age below which a change of a file may share its time with a later change: file systems count
/// in ticks of some milliseconds.
const SETTLED_AFTER: Duration = Duration::from_millis(100);

/// State of a file, as the file system describes it. Another file has another stamp, and so has a
/// file that was written, replaced or given another time; a file in a folder that was renamed keeps
/// it. The device is no part of it: machines number what they mount differently, and the time of
/// the last change, in nanoseconds, tells files with one inode number apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileStamp {
    inode: u64,
    len_bytes: u64,
    /// Time of the last change of the bytes, in nanoseconds since 1970; users can set it.
    modified_ns: i128,
    /// Time of the last change of the bytes or of what describes them; users cannot set it.
    changed_ns: i128,
}

impl FileStamp {
    /// Returns the stamp of the file that `about` describes.
    pub fn of(about: &Metadata) -> Self {
        Self {
            inode: about.ino(),
            len_bytes: about.len(),
            modified_ns: nanoseconds(about.mtime(), about.mtime_nsec()),
            changed_ns: nanoseconds(about.ctime(), about.ctime_nsec()),
        }
    }

    /// Returns the length of the file, in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Returns whether the file has last changed before or when `other` has.
    pub fn is_no_newer_than(&self, other: &Self) -> bool {
        self.changed_ns <= other.changed_ns
    }

    /// Returns whether the bytes of a file with this stamp are those of `other`, as far as its
    /// length and the time of their last change tell: permissions, owners and links may have
    /// changed.
    pub fn has_bytes_of(&self, other: &Self) -> bool {
        self.len_bytes == other.len_bytes && self.modified_ns == other.modified_ns
    }

    /// Returns whether a later change would give the file another stamp: its last one lies some
    /// time back.
    pub fn is_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.changed_ns + SETTLED_AFTER.as_nanos() as i128 <= now.as_nanos() as i128
    }
}

/// The stamp as text: equal texts are equal stamps.
impl fmt::Display for FileStamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { inode, len_bytes, modified_ns, changed_ns } = self;
        write!(f, "{inode} {len_bytes} {modified_ns} {changed_ns}")
    }
}

fn nanoseconds(seconds: i64, nanoseconds: i64) -> i128 {
    i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds)
}
