//! Counters of the reading side, readable while it runs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What the reader threads have done so far.
#[derive(Debug, Default)]
pub struct ReadStats {
    read_ns: AtomicU64,
    wait_ns: AtomicU64,
    bytes: AtomicU64,
    samples: AtomicU64,
}

/// A reading of [`ReadStats`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadSnapshot {
    /// Time spent in reads, summed over threads.
    pub read: Duration,
    /// Time that threads waited for room, summed over threads.
    pub wait: Duration,
    /// Bytes of the members read.
    pub bytes: u64,
    /// Samples read.
    pub samples: u64,
}

impl ReadStats {
    pub(crate) fn add_read(&self, start: Instant, bytes: u64) {
        self.read_ns.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.samples.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn add_wait(&self, start: Instant) {
        self.wait_ns.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }

    /// The counters now.
    pub fn snapshot(&self) -> ReadSnapshot {
        ReadSnapshot {
            read: Duration::from_nanos(self.read_ns.load(Ordering::Relaxed)),
            wait: Duration::from_nanos(self.wait_ns.load(Ordering::Relaxed)),
            bytes: self.bytes.load(Ordering::Relaxed),
            samples: self.samples.load(Ordering::Relaxed),
        }
    }
}
