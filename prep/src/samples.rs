//! Writing of chosen samples as new shards, with all of their members.

use std::collections::HashSet;
use std::path::Path;

use pipeline::shard::write::{ShardLimits, ShardWriter};
use pipeline::{Progress, Shard};
use serde_json::{Value, json};

use crate::error::PrepError;

/// Form of shards that hold chosen samples.
#[derive(Debug, Clone, Copy)]
pub struct SampleOptions {
    /// Limits of a shard.
    pub limits: ShardLimits,
    /// `true` if samples get new keys, by number.
    pub renumber: bool,
}

impl SampleOptions {
    /// Returns the options as part of the identity of a job.
    pub fn identity(&self) -> Value {
        json!([self.limits.max_samples, self.limits.max_bytes, self.renumber])
    }
}

/// Writes samples, each a shard and a number in it, to shards in `out` that are named `prefix`; a
/// job that was stopped continues. Returns the number of shards. Each sample advances `progress`,
/// which the caller begins.
///
/// # Errors
/// [`PrepError::Data`].
pub fn write_samples(
    out: &Path,
    prefix: &str,
    options: &SampleOptions,
    samples: &[(&Shard, usize)],
    progress: &dyn Progress,
) -> Result<usize, PrepError> {
    let mut writer = ShardWriter::resume(out, prefix, options.limits)?;
    for (index, (shard, sample)) in samples.iter().enumerate() {
        let members = shard.members(*sample)?;
        let members: Vec<(&str, &[u8])> =
            members.iter().map(|(ext, bytes)| (ext.as_str(), bytes.as_slice())).collect();
        let renumbered = options.renumber.then(|| format!("{index:08}"));
        writer.add(renumbered.as_deref().unwrap_or(shard.key(*sample)), &members)?;
        progress.advance(1);
    }
    Ok(writer.finish()?.len())
}

/// A list of samples: a line is a key, or shard, tab and key, because keys of different shards may
/// be the same.
pub struct KeyList(HashSet<String>);

impl KeyList {
    /// Reads the list at `path`.
    ///
    /// # Errors
    /// [`PrepError::Io`].
    pub fn read(path: &Path) -> Result<Self, PrepError> {
        let text = std::fs::read_to_string(path).map_err(|error| PrepError::io("read", path, error))?;
        // As keys are read: without what tar writes before the names of a folder's files.
        Ok(Self(text.lines().map(|line| line.strip_prefix("./").unwrap_or(line).to_string()).collect()))
    }

    /// Returns whether the list names the sample `key` of `shard`.
    pub fn names(&self, shard: Option<&str>, key: &str) -> bool {
        self.0.contains(key) || shard.is_some_and(|shard| self.0.contains(&format!("{shard}\t{key}")))
    }
}

/// Checks that keys differ: two adjacent samples with the same key would become one sample.
///
/// # Errors
/// [`PrepError::RepeatedKey`].
pub fn check_keys<'a>(samples: impl Iterator<Item = (&'a Shard, usize)>) -> Result<(), PrepError> {
    let mut seen = HashSet::new();
    for (shard, index) in samples {
        let key = shard.key(index);
        if !seen.insert(key) {
            return Err(PrepError::RepeatedKey { key: key.to_string(), shard: shard.name() });
        }
    }
    Ok(())
}
