//! What an update does to a shard, range by range.

use std::ops::Range;

/// PyTorch's epsilon; Burn's default of 1e-5 is another optimizer.
pub(super) const EPSILON: f32 = 1e-8;

/// What is done to one parameter in one update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Constants {
    /// Factor of weight decay.
    pub(super) shrink: f32,
    pub(super) clip: f32,
    pub(super) beta1: f32,
    pub(super) beta2: f32,
    pub(super) rate: f32,
    pub(super) root: f32,
}

/// What is done to a shard in one update, by ranges of it.
pub(super) type Update = Vec<(Range<usize>, Constants)>;

/// The decay of the follower `name`.
pub(super) fn decay_of(decays: &[(&'static str, f64)], name: &str) -> f64 {
    // Shards are made for the followers that the method lists, and so are the decays.
    decays.iter().find(|(of, _)| *of == name).map_or(1.0, |(_, decay)| *decay)
}
