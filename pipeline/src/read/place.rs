//! Places in the stream of samples.

/// Sample at a position of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// Index of the pass over the sample's source.
    pub epoch: u64,
    /// Index of the shard in the list.
    pub shard: usize,
    /// Index of the sample in the shard.
    pub sample: u64,
    /// Number of times that the sample has been shown before in this pass: more than 0 only for
    /// samples with a large weight.
    pub repeat: u64,
}

/// Shards that are read from a position on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lookahead {
    /// First position from which other shards may be read.
    pub end: u64,
    /// Shards up to that position, then those of the next window.
    pub shards: Vec<usize>,
}
