//! Places in the stream of samples.

/// Sample at a position of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// Number of the pass over the sample's source.
    pub epoch: u64,
    /// Number of the shard in the list.
    pub shard: usize,
    /// Number of the sample in the shard.
    pub sample: u64,
    /// Number of times that the sample has been shown before in this pass: more than 0 only for
    /// samples with a large weight.
    pub repeat: u64,
}

/// Shards that are read from a position on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lookahead {
    /// The first position from which on others may be read.
    pub end: u64,
    /// The shards up to it, then those that follow.
    pub shards: Vec<usize>,
}
