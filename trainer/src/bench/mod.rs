//! What `ocelli bench` measures.

pub mod backbone;
pub mod compare;
pub mod noise;
mod products;
pub mod shard;
pub mod step;

/// Several times of the same thing. On a machine that others use, too, their spread says what a difference is worth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    /// The one in the middle.
    pub median_ms: f64,
    /// The shortest and the longest.
    pub range_ms: [f64; 2],
}

impl Times {
    /// Summarizes the times `ms`, of which there is at least one.
    pub(crate) fn of(mut ms: Vec<f64>) -> Self {
        ms.sort_by(f64::total_cmp);
        Self { median_ms: ms[ms.len() / 2], range_ms: [ms[0], ms[ms.len() - 1]] }
    }
}

fn median(values: Vec<f64>) -> f64 {
    Times::of(values).median_ms
}
