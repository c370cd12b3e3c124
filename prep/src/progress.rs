//! Progress of long jobs.

/// Receiver of progress.
pub trait Progress: Sync {
    /// Begins a job of `n` items.
    fn begins(&self, n: u64);

    /// Counts `n` more items as done.
    fn advances(&self, n: u64);
}
