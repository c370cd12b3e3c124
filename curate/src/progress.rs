//! Progress of a long computation, as its caller sees it.

/// Receiver of progress.
pub trait Progress: Sync {
    /// Begins a stage of `n_rows` rows.
    fn begins(&self, stage: &str, n_rows: u64);

    /// Counts `n_rows` rows as done.
    fn advances(&self, n_rows: u64);

    /// Saves the centers of k-means, `[K, D]`, after `n_iterations`, so that it can continue from them.
    ///
    /// # Errors
    /// The error of writing, which ends the computation.
    fn save(&self, centers: &[f32], n_iterations: usize) -> std::io::Result<()> {
        let _ = (centers, n_iterations);
        Ok(())
    }
}

/// Receiver that ignores progress.
pub struct Silent;

impl Progress for Silent {
    fn begins(&self, _: &str, _: u64) {}

    fn advances(&self, _: u64) {}
}
