//! Errors of the data path, from a shard on disk to a sample in memory.

use std::path::{Path, PathBuf};

use crate::words::counted;

/// An error of the data path. Each variant names the shard, key or file it is about.
#[derive(Debug, thiserror::Error)]
pub enum PipelineError {
    /// A file could not be opened, read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// Operation that failed, as a verb: "open", "read", "write".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The shard that the user named does not exist.
    #[error("shard {} does not exist; check the path and any braces or wildcards in it", path.display())]
    MissingShard {
        /// Path or URL of the missing shard.
        path: PathBuf,
    },
    /// The file is not a tar archive.
    #[error("shard {} is not a tar file: {reason}", path.display())]
    NotATar {
        /// The shard.
        path: PathBuf,
        /// Description of what was found instead.
        reason: String,
    },
    /// The Parquet file cannot be read, or has no images.
    #[error("Parquet file {} cannot be used: {reason}", path.display())]
    NotParquet {
        /// The file.
        path: PathBuf,
        /// Description of what was found instead.
        reason: String,
    },
    /// The end-of-archive marker is missing, as if the tar had been cut between two members.
    #[error(
        "shard {} is truncated: no end-of-archive marker after {last}; copy or write the shard again",
        path.display()
    )]
    MissingEnd {
        /// The shard.
        path: PathBuf,
        /// Name of the last member.
        last: String,
    },
    /// Data follows the end of the archive, or zeros have overwritten members.
    #[error(
        "shard {}: the archive ends at byte {end_bytes}, after {last}, but {found}; copy or write the shard \
         again, or list tars separately instead of concatenating them", path.display()
    )]
    TrailingData {
        /// The shard.
        path: PathBuf,
        /// Name of the last member.
        last: String,
        /// Byte at which the archive ends.
        end_bytes: u64,
        /// Description of what follows.
        found: String,
    },
    /// The tar ends in the middle of a member.
    #[error(
        "shard {} is truncated: member {member} needs bytes up to {needed_bytes}, but the file has \
         {actual_bytes}; copy or write the shard again", path.display()
    )]
    Truncated {
        /// The shard.
        path: PathBuf,
        /// Name of the member that is cut off.
        member: String,
        /// End of the member's data.
        needed_bytes: u64,
        /// Length of the file.
        actual_bytes: u64,
    },
    /// A member cannot be part of its sample.
    #[error("shard {}, member {member}: {reason}", path.display())]
    BadMember {
        /// The shard.
        path: PathBuf,
        /// Name of the member.
        member: String,
        /// Reason: its extension occurs twice in the sample, or it is too large for the index.
        reason: String,
    },
    /// A sidecar index or a `wids` list cannot be used.
    #[error("index {} is unusable: {reason}; rebuild it with `ocelli shards index --overwrite`", path.display())]
    BadIndex {
        /// The sidecar or the list.
        path: PathBuf,
        /// Reason why it cannot be used.
        reason: String,
    },
    /// A shard list cannot be expanded.
    #[error("shard list {spec:?}: {reason}")]
    InvalidShardList {
        /// The list without secrets, truncated if it is long.
        spec: String,
        /// Reason why it cannot be expanded.
        reason: String,
    },
    /// A folder or a list contains no image.
    #[error("no image in {}: no readable file there ends in {wanted}", path.display())]
    NoImages {
        /// The folder or the list.
        path: PathBuf,
        /// File name endings of images.
        wanted: String,
    },
    /// The shards hold no sample with one of the wanted extensions.
    #[error(
        "no samples: no member with extension {wanted} in {}; first shard {first}",
        counted(*n_shards as u64, "shard")
    )]
    Empty {
        /// Number of shards that were read.
        n_shards: usize,
        /// The extensions that make a sample usable.
        wanted: String,
        /// The first shard of the list.
        first: String,
    },
    /// A sample has no member that holds an image.
    #[error("shard {shard}, sample {key}: no member with extension {wanted}")]
    MissingField {
        /// The shard.
        shard: String,
        /// Key of the sample.
        key: String,
        /// The extensions that were searched for.
        wanted: String,
    },
    /// Too many samples are bad.
    #[error(
        "{n_bad} of the first {n_seen} samples are unusable, above the limit of {max_rate_percent} %; \
         last: shard {shard}, sample {key}: {reason}. See {} or raise data.max_bad_rate", ledger.display()
    )]
    TooManyBad {
        /// Number of distinct bad samples.
        n_bad: u64,
        /// Number of samples requested so far.
        n_seen: u64,
        /// Limit of the rate of bad samples, in percent.
        max_rate_percent: f64,
        /// Shard of the last bad sample.
        shard: String,
        /// Key of the last bad sample.
        key: String,
        /// Reason why it is bad.
        reason: String,
        /// Ledger with all bad samples.
        ledger: PathBuf,
    },
    /// Every sample of the data set is bad.
    #[error("none of the {n_samples} samples are usable; see {}", ledger.display())]
    AllBad {
        /// Number of samples of the data set.
        n_samples: u64,
        /// The ledger with the reasons.
        ledger: PathBuf,
    },
    /// The batch size is not divisible by the number of ranks.
    #[error("a global batch of {batch_size} samples is not divisible by {world_size} ranks")]
    UnevenShare {
        /// Number of samples of a global batch.
        batch_size: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// A remote shard could not be fetched.
    #[error("cannot fetch {url}: {reason}")]
    Fetch {
        /// The shard, without secrets.
        url: String,
        /// Description of the attempts and of their failure.
        reason: String,
    },
    /// The bytes of a shard differ from what its index or its list states.
    #[error("shard {shard} is not the expected one: {reason}")]
    ShardMismatch {
        /// The shard.
        shard: String,
        /// Description of the difference.
        reason: String,
    },
    /// The bytes of a member have changed since it was indexed.
    #[error(
        "shard {shard}, sample {key}: its {extension} has changed since it was indexed; check the disk, or \
         rebuild the index"
    )]
    Changed {
        /// The shard.
        shard: String,
        /// Key of the sample.
        key: String,
        /// Extension of the member.
        extension: String,
    },
    /// The cache cannot hold all bytes that are needed at the same time.
    #[error(
        "the cache of {:.0} MB (--cache-gb) is too small: it must hold {:.0} MB at once. Training needs two \
         windows of data.window_shards shards; other commands need one shard",
        *max_bytes as f64 / 1e6, (*needed_bytes as f64 / 1e6).ceil()
    )]
    CacheTooSmall {
        /// Size of one shard or of two windows of shards, in bytes.
        needed_bytes: u64,
        /// Size limit of the cache, in bytes.
        max_bytes: u64,
    },
    /// Shares of sources or weights of samples do not fit the data set.
    #[error("data.mix and data.weights: {reason}")]
    Sampling {
        /// Reason.
        reason: String,
    },
    /// A shard writer would overwrite an existing file.
    #[error("{} already exists; delete it or choose another output folder", path.display())]
    Exists {
        /// The existing file.
        path: PathBuf,
    },
}

impl PipelineError {
    /// Returns whether the error concerns one damaged shard, so that others may still be read.
    pub fn is_shard_error(&self) -> bool {
        matches!(
            self,
            Self::NotATar { .. }
                | Self::NotParquet { .. }
                | Self::MissingEnd { .. }
                | Self::TrailingData { .. }
                | Self::Truncated { .. }
                | Self::BadMember { .. }
                | Self::BadIndex { .. }
                | Self::ShardMismatch { .. }
        )
    }

    /// Returns whether the error concerns one sample, so that others may still be used.
    pub fn is_sample_error(&self) -> bool {
        matches!(
            self,
            Self::MissingField { .. }
                | Self::Changed { .. }
                | Self::BadMember { .. }
                | Self::Io { action: "read", .. }
        )
    }

    /// Creates an I/O error on `path` during `action`.
    pub fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }
}
