//! Extraction of members of shards as files.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use pipeline::shard::leads_out_of_folder;
use pipeline::{PipelineError, Progress, Shard, Storage};

use crate::classes::ClassNames;
use crate::error::PrepError;
use crate::rewrite::{RewriteJob, check_names};

/// Counts of extracted samples.
pub struct Extracted {
    /// Number of samples.
    pub n_samples: u64,
    /// Number of their files.
    pub n_files: u64,
}

/// Writes the members of the samples of `job` with one of `keys`, or of all samples, as files, in
/// one folder per shard. Existing files are replaced if the job overwrites.
///
/// # Errors
/// [`PrepError::FileExists`], [`PrepError::MissingKeys`] if no sample has one of the keys, or
/// [`PrepError`] when shards cannot be read or files cannot be written.
pub fn extract(
    job: &RewriteJob<'_>,
    keys: &[String],
    storage: &Storage,
    progress: &dyn Progress,
) -> Result<Extracted, PrepError> {
    let sources = storage.sources(job.shards)?;
    check_names(&sources)?;
    // Before files are written: lists of classes may differ.
    let classes = ClassNames::read(&sources)?;
    let wanted: HashSet<&str> = keys.iter().map(|key| key.strip_prefix("./").unwrap_or(key)).collect();
    progress.begin("extract", sources.len() as u64);
    let mut extracted = Extracted { n_samples: 0, n_files: 0 };
    for source in &sources {
        let shard = storage.open(source)?;
        let name = source.url.tar_name();
        let folder = job.out.join(name.strip_suffix(".tar").unwrap_or(&name));
        for i in (0..shard.len()).filter(|i| wanted.is_empty() || wanted.contains(shard.key(*i))) {
            for (extension, bytes) in shard.members(i)? {
                let target = inside(&shard, &folder, format!("{}.{extension}", shard.key(i)))?;
                write(&target, &bytes, job.overwrite)?;
                extracted.n_files += 1;
            }
            extracted.n_samples += 1;
        }
        progress.advance(1);
    }
    classes.copy(job.out, job.overwrite)?;
    if extracted.n_samples == 0 && !wanted.is_empty() {
        return Err(PrepError::MissingKeys { n_keys: wanted.len(), n_shards: sources.len() });
    }
    Ok(extracted)
}

/// Returns the path of `member` below `folder`. A member's name is not trusted: it must not lead
/// out of the folder.
fn inside(shard: &Shard, folder: &Path, member: String) -> Result<PathBuf, PipelineError> {
    if leads_out_of_folder(&member) {
        let reason = "it would be written outside the folder".into();
        return Err(PipelineError::BadMember { path: shard.name().into(), member, reason });
    }
    Ok(folder.join(member))
}

fn write(target: &Path, bytes: &[u8], overwrite: bool) -> Result<(), PrepError> {
    if target.exists() && !overwrite {
        return Err(PrepError::FileExists { path: target.to_path_buf() });
    }
    if let Some(folder) = target.parent() {
        fs::create_dir_all(folder).map_err(|error| PrepError::io("create", folder, error))?;
    }
    pipeline::file::replace_unsynced(target, bytes).map_err(|error| PrepError::io("write", target, error))
}
