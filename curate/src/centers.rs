//! Centers of a level that is not complete.

/// Centers after some iterations of k-means, or after they were computed again (resampling).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Centers {
    /// Centers, `[K, D]`.
    pub values: Vec<f32>,
    /// Number of iterations of the first k-means so far; 0 if they were computed again.
    pub n_iterations: usize,
    /// Number of times that they were computed again.
    pub n_resamplings: usize,
}
