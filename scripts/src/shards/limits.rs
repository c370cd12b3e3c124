//! Flags of shards that hold chosen samples.

use pipeline::shard::write::ShardLimits;
use prep::samples::SampleOptions;

/// Flags of shards that hold chosen samples.
#[derive(clap::Args)]
pub(crate) struct LimitFlags {
    /// Maximum number of samples per shard, at least 1.
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = crate::values::at_least_one)]
    samples_per_shard: u64,
    /// Maximum size of a shard, in bytes; 0 for no limit.
    #[arg(long, value_name = "N", default_value_t = 1 << 30)]
    bytes_per_shard: u64,
    /// Give samples new, numbered keys. Needed if different shards have the same keys.
    #[arg(long)]
    pub(crate) renumber: bool,
}

impl LimitFlags {
    /// Returns the form of the shards.
    pub(crate) fn options(&self) -> SampleOptions {
        let max_bytes = max_bytes(self.bytes_per_shard);
        let limits = ShardLimits { max_samples: self.samples_per_shard, max_bytes };
        SampleOptions { limits, renumber: self.renumber }
    }
}

/// Returns the maximum size of a shard for the number of a flag, of which 0 sets no limit.
pub(crate) fn max_bytes(bytes_per_shard: u64) -> Option<u64> {
    (bytes_per_shard > 0).then_some(bytes_per_shard)
}
