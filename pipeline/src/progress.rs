//! Progress of long jobs.

/// Receiver of progress.
pub trait Progress: Sync {
    /// Begins a stage of `n` items.
    fn begin(&self, stage: &str, n: u64);

    /// Counts `n` more items of the stage as done.
    fn advance(&self, n: u64);
}

/// Receiver that ignores progress.
pub struct NoProgress;

impl Progress for NoProgress {
    fn begin(&self, _: &str, _: u64) {}

    fn advance(&self, _: u64) {}
}
