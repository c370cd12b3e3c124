//! Statistics of the reader threads, available while they run.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

/// Longest read that the histogram resolves, in nanoseconds; longer reads count as this.
const MAX_NS: u64 = 60_000_000_000;

/// Number of significant digits of a percentile.
const DIGITS: u8 = 2;

/// Statistics of the reader threads since the last reset.
#[derive(Debug)]
pub struct ReadStats(Mutex<ReadTotals>);

#[derive(Debug)]
struct ReadTotals {
    snapshot: ReadSnapshot,
    reads: Histogram<u64>,
}

/// A snapshot of [`ReadStats`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadSnapshot {
    /// Time spent in reads, summed over threads.
    pub read: Duration,
    /// Median time of a read.
    pub read_p50: Duration,
    /// 99th percentile of the time of a read.
    pub read_p99: Duration,
    /// Time that threads waited for the limits of the loader, summed over threads.
    pub wait: Duration,
    /// Number of bytes of the images read.
    pub bytes: u64,
    /// Number of samples read.
    pub samples: u64,
}

impl Default for ReadStats {
    fn default() -> Self {
        Self(Mutex::new(ReadTotals::new()))
    }
}

impl ReadTotals {
    fn new() -> Self {
        let reads = Histogram::new_with_bounds(1, MAX_NS, DIGITS).expect("bounds and digits are valid");
        Self { snapshot: ReadSnapshot::default(), reads }
    }
}

impl ReadStats {
    pub(crate) fn add_read(&self, start: Instant, bytes: u64) {
        let time = start.elapsed();
        let mut totals = self.lock();
        totals.snapshot.read += time;
        totals.snapshot.bytes += bytes;
        totals.snapshot.samples += 1;
        totals.reads.saturating_record(time.as_nanos() as u64);
    }

    pub(crate) fn add_wait(&self, start: Instant) {
        let time = start.elapsed();
        self.lock().snapshot.wait += time;
    }

    /// Resets all counters, for a measurement after a warm-up.
    pub fn reset(&self) {
        *self.lock() = ReadTotals::new();
    }

    /// Returns a snapshot of the counters.
    pub fn snapshot(&self) -> ReadSnapshot {
        let totals = self.lock();
        let read_p50 = Duration::from_nanos(totals.reads.value_at_quantile(0.5));
        let read_p99 = Duration::from_nanos(totals.reads.value_at_quantile(0.99));
        ReadSnapshot { read_p50, read_p99, ..totals.snapshot }
    }

    fn lock(&self) -> MutexGuard<'_, ReadTotals> {
        // Numbers stay valid if a holder panics.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
