//! Centers of a level whose computation has not ended.
//!
//! A computation that continues from them ends with the same bits.

/// Centers after some iterations of k-means, or after resampling.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Centers {
    /// Centers, `[K, D]`.
    pub values: Vec<f32>,
    /// Number of iterations of the first k-means so far; 0 after resampling.
    pub n_iterations: usize,
    /// Number of resamplings so far.
    pub n_resamplings: usize,
}
