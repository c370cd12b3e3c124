//! Writing of chosen samples as new shards, with all of their members.

use std::collections::HashSet;
use std::path::Path;

use anyhow::{Context, bail};
use indicatif::ProgressBar;
use pipeline::Shard;
use pipeline::shard::write::{ShardLimits, ShardWriter};
use serde_json::{Value, json};

/// Flags of shards that hold chosen samples.
#[derive(clap::Args)]
pub(crate) struct LimitFlags {
    /// Largest number of samples of a shard.
    #[arg(long, default_value_t = 10_000)]
    samples_per_shard: u64,
    /// Largest size of a shard, in bytes.
    #[arg(long, default_value_t = 1 << 30)]
    bytes_per_shard: u64,
    /// Give samples new keys, by number. Needed if different shards have the same keys.
    #[arg(long)]
    pub(crate) renumber: bool,
}

impl LimitFlags {
    /// Returns the limits of a shard.
    fn limits(&self) -> ShardLimits {
        ShardLimits { max_samples: self.samples_per_shard.max(1), max_bytes: self.bytes_per_shard }
    }

    /// Returns the flags as part of the identity of a job.
    pub(crate) fn identity(&self) -> Value {
        json!([self.samples_per_shard, self.bytes_per_shard, self.renumber])
    }
}

/// Writes samples, each a shard and a number in it, to shards in `out` that are named `prefix`; a
/// job that was stopped continues. Returns the number of shards.
pub(crate) fn write_samples(
    out: &Path,
    prefix: &str,
    flags: &LimitFlags,
    samples: &[(&Shard, usize)],
    progress: &ProgressBar,
) -> anyhow::Result<usize> {
    let mut writer = ShardWriter::resume(out, prefix, flags.limits())?;
    for (number, (shard, sample)) in samples.iter().enumerate() {
        let members = shard.members(*sample)?;
        let members: Vec<(&str, &[u8])> =
            members.iter().map(|(ext, bytes)| (ext.as_str(), bytes.as_slice())).collect();
        let renumbered = flags.renumber.then(|| format!("{number:08}"));
        writer.add(renumbered.as_deref().unwrap_or(shard.key(*sample)), &members)?;
        progress.inc(1);
    }
    Ok(writer.finish()?.len())
}

/// A list of samples: a line is a key, or shard, tab and key, because keys of different shards may
/// be the same.
pub(crate) struct KeyList(HashSet<String>);

impl KeyList {
    /// Reads the list at `path`.
    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        // As keys are read: without what tar writes before the names of a folder's files.
        Ok(Self(text.lines().map(|line| line.strip_prefix("./").unwrap_or(line).to_string()).collect()))
    }

    /// Returns whether the list names the sample `key` of `shard`.
    pub(crate) fn names(&self, shard: Option<&str>, key: &str) -> bool {
        self.0.contains(key) || shard.is_some_and(|shard| self.0.contains(&format!("{shard}\t{key}")))
    }
}

/// Checks that keys differ: two adjacent samples with the same key would become one sample.
pub(crate) fn check_keys<'a>(samples: impl Iterator<Item = (&'a Shard, usize)>) -> anyhow::Result<()> {
    let mut seen = HashSet::new();
    for (shard, number) in samples {
        let key = shard.key(number);
        if !seen.insert(key) {
            bail!("key {key} occurs twice, the second time in {}; give --renumber", shard.name());
        }
    }
    Ok(())
}
