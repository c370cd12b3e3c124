//! Writing of chosen samples as new shards, with all of their members.

use std::collections::HashSet;
use std::path::Path;

use pipeline::shard::write::{ShardLimits, ShardWriter};
use pipeline::words::counted;
use pipeline::{Progress, Shard};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

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
        // Earlier releases recorded no limit as the largest number.
        let max_bytes = self.limits.max_bytes.unwrap_or(u64::MAX);
        json!([self.limits.max_samples, max_bytes, self.renumber])
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
pub struct KeyList {
    lines: HashSet<String>,
    /// Hash of the bytes of the file.
    hash: u64,
}

impl KeyList {
    /// Reads the list at `path`.
    ///
    /// # Errors
    /// [`PrepError::Io`].
    pub fn read(path: &Path) -> Result<Self, PrepError> {
        let text = std::fs::read_to_string(path).map_err(|error| PrepError::io("read", path, error))?;
        let mut lines = HashSet::new();
        for line in text.lines().filter(|line| !line.is_empty()) {
            // As keys are read: without what tar writes before the names of a folder's files.
            lines.insert(line.strip_prefix("./").unwrap_or(line).to_string());
        }
        Ok(Self { lines, hash: xxh3_64(text.as_bytes()) })
    }

    /// Returns the hash of the bytes of the file, by which a job recognizes its list.
    pub fn hash(&self) -> String {
        format!("{:016x}", self.hash)
    }

    /// Returns whether the list names the sample `key` of `shard`.
    pub fn names(&self, shard: Option<&str>, key: &str) -> bool {
        !self.lines_of(shard, key).is_empty()
    }

    /// Returns the lines that name the sample `key` of `shard`.
    pub fn lines_of(&self, shard: Option<&str>, key: &str) -> Vec<&str> {
        let mut lines = Vec::new();
        lines.extend(self.lines.get(key).map(String::as_str));
        if let Some(shard) = shard {
            lines.extend(self.lines.get(&format!("{shard}\t{key}")).map(String::as_str));
        }
        lines
    }

    /// Warns of the lines of the list, the file at `path`, that are not among `found`, those that
    /// name a sample.
    pub fn report_others(&self, path: &Path, found: &HashSet<&str>) {
        let others = self.lines.iter().filter(|line| !found.contains(line.as_str()));
        // The first one by name: the order of a set changes from run to run.
        let Some(first) = others.clone().min() else { return };
        tracing::warn!(
            "{}: {} without a sample in these shards, such as {first:?}: a line is the key of a sample, as \
             `ocelli shards ls` lists it, or its shard, a tab and the key",
            path.display(),
            counted(others.count() as u64, "line")
        );
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
