//! Measurements of `ocelli bench`.

pub mod allocator;
pub mod backbone;
pub mod compare;
pub mod figures;
pub mod layers;
pub mod loader;
pub mod memory_gauge;
pub mod noise;
pub mod operations;
mod products;
pub mod shard;
pub mod speed;
pub mod step;

/// Repeated times of one operation. On a machine with other load, their range shows which
/// differences are significant.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    /// Median time.
    pub median_ms: f64,
    /// Shortest and longest time.
    pub range_ms: [f64; 2],
}

impl Times {
    /// Summarizes the times `ms`, of which there is at least one.
    pub(crate) fn new(mut ms: Vec<f64>) -> Self {
        ms.sort_by(f64::total_cmp);
        Self { median_ms: ms[ms.len() / 2], range_ms: [ms[0], ms[ms.len() - 1]] }
    }
}

/// Returns the median of `values`, of which there is at least one.
fn median(values: Vec<f64>) -> f64 {
    Times::new(values).median_ms
}
