//! Everything that can go wrong between a shard on disk and a sample in memory.

use std::path::{Path, PathBuf};

/// An error of the data path. Each variant names the shard, key or file it is about.
#[derive(Debug, thiserror::Error)]
pub enum PipelineError {
    /// A file could not be opened, read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was being done, as a verb: "open", "read", "write".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// No file matches what the user named.
    #[error("shard {} does not exist; check the path, and braces or patterns in it", path.display())]
    MissingShard {
        /// The file that was looked for.
        path: PathBuf,
    },
    /// The file is not a tar archive.
    #[error("shard {} is not a tar file: {reason}", path.display())]
    NotATar {
        /// The shard.
        path: PathBuf,
        /// What was found instead.
        reason: String,
    },
    /// A tar has no end, as if it had been cut between two members.
    #[error(
        "shard {} is truncated: the end of the archive is missing after {last}; copy or write the shard again",
        path.display()
    )]
    NoEnd {
        /// The shard.
        path: PathBuf,
        /// Its last member.
        last: String,
    },
    /// Something follows the end of an archive, or zeros stand where members were.
    #[error(
        "shard {}: its archive ends at byte {end_bytes}, after {last}, and {found}; copy or write the shard again, or \
         name joined tars one by one", path.display()
    )]
    AfterEnd {
        /// The shard.
        path: PathBuf,
        /// Its last member.
        last: String,
        /// Byte at which the archive ends.
        end_bytes: u64,
        /// Description of what follows.
        found: String,
    },
    /// The tar ends in the middle of a member.
    #[error(
        "shard {} is truncated: member {member} needs bytes up to {needed_bytes}, the file has \
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
        /// Why: its extension stands twice in the sample, or it is too large for the index.
        reason: String,
    },
    /// A sidecar index cannot be understood.
    #[error("index {} is not usable: {reason}; `ocelli shards index --overwrite` builds it again", path.display())]
    BadIndex {
        /// The sidecar.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A shard list that cannot be expanded.
    #[error("shard list {spec:?}: {reason}")]
    BadUrl {
        /// As the user wrote it.
        spec: String,
        /// What is wrong with it.
        reason: String,
    },
    /// There are no images where they were looked for.
    #[error("no image in {}: no file there that can be read ends in {wanted}", path.display())]
    NoImages {
        /// A folder or a list.
        path: PathBuf,
        /// Endings of images.
        wanted: String,
    },
    /// The shards hold no sample with one of the wanted extensions.
    #[error("no samples: {n_shards} shard(s) hold no member with extension {wanted}; first shard {first}")]
    Empty {
        /// How many shards were read.
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
        /// The extensions that were looked for.
        wanted: String,
    },
    /// Too many samples were bad.
    #[error(
        "{n_bad} of the first {n_seen} samples are unusable, above the limit of {max_rate_percent} %; \
         last: shard {shard}, sample {key}: {reason}. See {} or raise data.max_bad_rate", ledger.display()
    )]
    TooManyBad {
        /// Distinct bad samples.
        n_bad: u64,
        /// Samples asked for so far.
        n_seen: u64,
        /// The limit.
        max_rate_percent: f64,
        /// Shard of the last bad sample.
        shard: String,
        /// Key of the last bad sample.
        key: String,
        /// Why it is bad.
        reason: String,
        /// The ledger with all of them.
        ledger: PathBuf,
    },
    /// Every sample of the data set is bad.
    #[error("none of the {n_samples} samples is usable; see {}", ledger.display())]
    AllBad {
        /// Size of the data set.
        n_samples: u64,
        /// The ledger with the reasons.
        ledger: PathBuf,
    },
    /// The batch does not divide by the ranks.
    #[error("a global batch of {batch_size} samples does not divide by {world_size} ranks")]
    UnevenShare {
        /// Samples of a global batch.
        batch_size: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// A shard of elsewhere did not come.
    #[error("cannot fetch {url}: {reason}")]
    Fetch {
        /// The shard, without secrets.
        url: String,
        /// What was tried and what happened.
        reason: String,
    },
    /// What came is not what the index or the list promised.
    #[error("shard {shard} is not the one that was promised: {reason}")]
    OtherShard {
        /// The shard.
        shard: String,
        /// In which way.
        reason: String,
    },
    /// A member has other bytes than when it was indexed.
    #[error(
        "shard {shard}, sample {key}: its {extension} has changed since it was indexed; check the disk, \
         or write the index again"
    )]
    Changed {
        /// The shard.
        shard: String,
        /// Key of the sample.
        key: String,
        /// The member.
        extension: String,
    },
    /// The cache cannot hold what must be there at the same time.
    #[error(
        "the cache of {:.0} MB (--cache-gb) is too small: {:.0} MB are needed at a time. Training needs two \
         windows of data.window_shards shards, everything else one shard",
        *max_bytes as f64 / 1e6, (*needed_bytes as f64 / 1e6).ceil()
    )]
    CacheTooSmall {
        /// Bytes of a shard, or of two windows.
        needed_bytes: u64,
        /// The limit.
        max_bytes: u64,
    },
    /// A shard writer was asked to overwrite something.
    #[error("{} exists; choose another output folder or delete it", path.display())]
    Exists {
        /// The file that stands in the way.
        path: PathBuf,
    },
}

impl PipelineError {
    /// Whether a shard is damaged, so that others may still be read.
    pub fn is_of_a_shard(&self) -> bool {
        matches!(
            self,
            Self::NotATar { .. }
                | Self::NoEnd { .. }
                | Self::AfterEnd { .. }
                | Self::Truncated { .. }
                | Self::BadMember { .. }
                | Self::BadIndex { .. }
                | Self::OtherShard { .. }
        )
    }

    /// Whether it says that one sample cannot be used, and nothing of the others.
    pub fn is_of_a_sample(&self) -> bool {
        matches!(
            self,
            Self::MissingField { .. }
                | Self::Changed { .. }
                | Self::BadMember { .. }
                | Self::Io { action: "read", .. }
        )
    }

    /// An I/O error on `path` while doing `action`.
    pub fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }
}
