//! Writing of chosen samples as new shards, with all of their members.

use std::collections::HashSet;
use std::path::Path;

use anyhow::bail;
use indicatif::ProgressBar;
use pipeline::Shard;
use pipeline::shard::write::{ShardLimits, ShardWriter};

/// Writes samples, each a shard and a number in it, to shards in `out` that are named `prefix`; a job that was stopped continues. Returns
/// the number of shards. With `renumbers`, samples have numbers for keys.
pub(crate) fn write_samples(
    out: &Path,
    prefix: &str,
    limits: ShardLimits,
    samples: &[(&Shard, usize)],
    renumbers: bool,
    progress: &ProgressBar,
) -> anyhow::Result<usize> {
    let mut writer = ShardWriter::resume(out, prefix, limits)?;
    for (number, (shard, sample)) in samples.iter().enumerate() {
        let members = shard.members(*sample)?;
        let members: Vec<(&str, &[u8])> =
            members.iter().map(|(ext, bytes)| (ext.as_str(), bytes.as_slice())).collect();
        let renumbered = renumbers.then(|| format!("{number:08}"));
        writer.add(renumbered.as_deref().unwrap_or(shard.key(*sample)), &members)?;
        progress.inc(1);
    }
    Ok(writer.finish()?.len())
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
