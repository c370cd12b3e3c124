//! A job of packing: its images and settings, the contents of its shards, and the file beside them
//! that describes the job.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use pipeline::shard::write::ShardLimits;
use pipeline::{ColumnNames, PipelineError};
use serde_json::{Value, json};
use xxhash_rust::xxh3::Xxh3;

use crate::bands::Sample;
use crate::classes::Classes;
use crate::error::PrepError;
use crate::job::Job;
use crate::parts::{Part, Work, check_none_missing};

/// Images to pack, and the settings.
pub struct PackJob<'a> {
    /// Folder or list of images.
    pub input: &'a Path,
    /// Columns of a list that hold the images and their classes.
    pub columns: &'a ColumnNames,
    /// Folder of the shards.
    pub out: &'a Path,
    /// Prefix of the shards' names.
    pub prefix: &'a str,
    /// Limits of a shard.
    pub limits: ShardLimits,
    /// List of classes that determines their numbers.
    pub classes: Option<&'a Path>,
    /// `true` if the classes of an earlier pack in the folder may be replaced.
    pub overwrite: bool,
    /// Seed of the order in which samples are packed.
    pub seed: u64,
    /// `true` if files such as `tile.b02.tif` are bands of one image.
    pub joins_bands: bool,
    /// Share of the job.
    pub work: Work,
}

/// Contents of a job's shards: all samples in their order, and the samples of each shard.
pub(crate) struct Contents {
    /// Key and sample.
    pub(crate) samples: Vec<(String, Sample)>,
    /// Bytes that each sample takes in a shard.
    pub(crate) sizes_bytes: Vec<u64>,
    pub(crate) classes: Classes,
    pub(crate) shards: Vec<Range<usize>>,
    /// Numbers of skipped files, by extension.
    pub(crate) skipped: BTreeMap<String, usize>,
}

/// Records the job beside the shards of its prefix, or checks that the recorded job is this one.
pub(crate) fn claim(job: &PackJob<'_>, contents: &Contents) -> Result<(), PrepError> {
    let this = description(job, contents);
    let mark = job_path(job);
    let existing_shard =
        (0..contents.shards.len()).map(|shard| shard_path(job, shard)).find(|path| path.exists());
    match Job::read(&mark)? {
        Some(recorded) if recorded == this => return Ok(()),
        // A whole job that has written nothing may start over with other flags. In a job in parts,
        // another part could be about to write.
        Some(_) if existing_shard.is_none() && job.work == Work::Whole => {
            // What failed before may be readable now.
            remove_failures(job)?;
            fs::remove_file(&mark).map_err(|error| PrepError::io("remove", &mark, error))?;
        }
        Some(_) => {
            let prefix = job.prefix.to_string();
            return Err(PrepError::OtherPack { prefix, out: job.out.to_path_buf(), mark });
        }
        None => {
            if let Work::Join(n_parts) = job.work {
                check_none_missing(&Part::all(n_parts).collect::<Vec<_>>())?;
            }
            if let Some(path) = existing_shard {
                return Err(PipelineError::Exists { path }.into());
            }
        }
    }
    if this.create(&mark)? {
        Ok(())
    } else {
        Err(PrepError::PackBegun { prefix: job.prefix.to_string(), out: job.out.to_path_buf() })
    }
}

/// Removes the lists of images that could not be packed into shards of this prefix.
fn remove_failures(job: &PackJob<'_>) -> Result<(), PrepError> {
    let prefix = format!("{}-", job.prefix);
    let entries = fs::read_dir(job.out).map_err(|error| PrepError::io("read", job.out, error))?;
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let number = name.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(".failures.jsonl"));
        if number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit())) {
            let path = entry.path();
            fs::remove_file(&path).map_err(|error| PrepError::io("remove", &path, error))?;
        }
    }
    Ok(())
}

/// Describes a job by everything that affects its shards.
fn description(job: &PackJob<'_>, contents: &Contents) -> Job {
    let mut hash = Xxh3::new();
    for ((key, Sample { entry, .. }), size_bytes) in contents.samples.iter().zip(&contents.sizes_bytes) {
        let classes = entry.classes.as_ref().map(|classes| classes.join("\n"));
        let mut line = json!([key, entry.name, classes, entry.columns, size_bytes]);
        if let (Some(mask), Value::Array(values)) = (&entry.mask, &mut line) {
            values.push(json!(mask.extension));
        }
        hash.update(line.to_string().as_bytes());
    }
    for shard in &contents.shards {
        hash.update(&(shard.end as u64).to_le_bytes());
    }
    for name in contents.classes.names().into_iter().flatten() {
        hash.update(name.as_bytes());
    }
    let input = job.input.canonicalize().unwrap_or_else(|_| job.input.to_path_buf());
    Job(json!({
        "verb": "pack",
        "input": input.display().to_string(),
        "parts": job.work.n_parts(),
        "shards": contents.shards.len(),
        "contents": format!("{:016x}", hash.digest()),
    }))
}

/// Returns the path of the description of the job.
pub(crate) fn job_path(job: &PackJob<'_>) -> PathBuf {
    job.out.join(format!("{}.job.json", job.prefix))
}

/// Returns the path of shard number `shard`.
pub(crate) fn shard_path(job: &PackJob<'_>, shard: usize) -> PathBuf {
    job.out.join(format!("{}-{shard:06}.tar", job.prefix))
}

/// Returns whether a shard of `n_samples` is done: it exists, or its list of failures names all of
/// its samples, and a shard without samples is not written.
pub(crate) fn is_done(job: &PackJob<'_>, shard: usize, n_samples: usize) -> bool {
    if shard_path(job, shard).exists() {
        return true;
    }
    let failures = fs::read_to_string(failures_path(job, shard)).unwrap_or_default();
    failures.lines().count() == n_samples
}

/// Returns the path of the list of images that could not be packed into a shard.
pub(crate) fn failures_path(job: &PackJob<'_>, shard: usize) -> PathBuf {
    shard_path(job, shard).with_extension("failures.jsonl")
}
