//! A job of packing: its images and settings, the contents of its shards, and the file beside them
//! that describes the job.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use pipeline::shard::write::ShardLimits;
use pipeline::{ColumnNames, PipelineError, file};
use serde_json::{Value, json};
use xxhash_rust::xxh3::Xxh3;

use super::bands::Sample;
use super::classes::Classes;
use crate::parts::{Part, Work, check_none_missing};

/// Images to pack, and the settings.
pub(crate) struct PackJob<'a> {
    /// Folder or list of images.
    pub(crate) input: &'a Path,
    /// Columns of a list that hold the images and their classes.
    pub(crate) columns: &'a ColumnNames,
    /// Folder of the shards.
    pub(crate) out: &'a Path,
    /// Prefix of the shards' names.
    pub(crate) prefix: &'a str,
    pub(crate) limits: ShardLimits,
    /// List of classes that determines their numbers.
    pub(crate) classes: Option<&'a Path>,
    /// `true` if the classes of an earlier pack in the folder may be replaced.
    pub(crate) overwrite: bool,
    /// Seed of the order in which samples are packed.
    pub(crate) seed: u64,
    /// `true` if files such as `tile.b02.tif` are bands of one image.
    pub(crate) joins_bands: bool,
    /// Share of the job.
    pub(crate) work: Work,
}

/// Contents of a job's shards: all samples in their order, and the samples of each shard.
pub(super) struct Contents {
    /// Key and sample.
    pub(super) samples: Vec<(String, Sample)>,
    /// Bytes that each sample takes in a shard.
    pub(super) sizes_bytes: Vec<u64>,
    pub(super) classes: Classes,
    pub(super) shards: Vec<Range<usize>>,
    /// Numbers of skipped files, by extension.
    pub(super) skipped: BTreeMap<String, usize>,
}

/// Records the job beside the shards of its prefix, or checks that the recorded job is this one.
pub(super) fn claim(job: &PackJob<'_>, contents: &Contents) -> anyhow::Result<()> {
    let this = description(job, contents);
    let mark = job_path(job);
    let existing_shard =
        (0..contents.shards.len()).map(|shard| shard_path(job, shard)).find(|path| path.exists());
    match read_job(&mark)? {
        Some(recorded) if recorded == this => return Ok(()),
        // A whole job that has written nothing may start over with other flags. In a job in parts,
        // another part could be about to write.
        Some(_) if existing_shard.is_none() && job.work == Work::Whole => {
            fs::remove_file(&mark).with_context(|| format!("cannot remove {}", mark.display()))?;
        }
        Some(_) => bail!(
            "{}-*.tar in {} are of another job, with other images, flags or parts: choose another --out or --prefix, or remove \
             these shards and {}",
            job.prefix,
            job.out.display(),
            mark.display()
        ),
        None => {
            if let Work::Join(n_parts) = job.work {
                check_none_missing(&Part::all(n_parts).collect::<Vec<_>>())?;
            }
            if let Some(path) = existing_shard {
                bail!(PipelineError::Exists { path });
            }
        }
    }
    let is_new = file::create_new(&mark, format!("{this}\n").as_bytes())
        .with_context(|| format!("cannot write {}", mark.display()))?;
    if is_new || read_job(&mark)?.as_ref() == Some(&this) {
        Ok(())
    } else {
        bail!("another job with the prefix {} has just begun in {}", job.prefix, job.out.display())
    }
}

/// Reads the description of a job at `path`; `None` if there is none.
fn read_job(path: &Path) -> anyhow::Result<Option<Value>> {
    match fs::read_to_string(path) {
        Ok(text) => {
            serde_json::from_str(&text).map(Some).with_context(|| format!("cannot read {}", path.display()))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// Describes a job by everything that affects its shards.
fn description(job: &PackJob<'_>, contents: &Contents) -> Value {
    let mut hash = Xxh3::new();
    for ((key, Sample { entry, .. }), size_bytes) in contents.samples.iter().zip(&contents.sizes_bytes) {
        let line = json!([key, entry.name, entry.class, entry.columns, size_bytes]);
        hash.update(line.to_string().as_bytes());
    }
    for shard in &contents.shards {
        hash.update(&(shard.end as u64).to_le_bytes());
    }
    for name in contents.classes.names().into_iter().flatten() {
        hash.update(name.as_bytes());
    }
    let input = job.input.canonicalize().unwrap_or_else(|_| job.input.to_path_buf());
    json!({
        "verb": "pack",
        "input": input.display().to_string(),
        "parts": job.work.n_parts(),
        "shards": contents.shards.len(),
        "contents": format!("{:016x}", hash.digest()),
    })
}

/// Returns the path of the description of the job.
pub(super) fn job_path(job: &PackJob<'_>) -> PathBuf {
    job.out.join(format!("{}.job.json", job.prefix))
}

/// Returns the path of shard number `shard`.
pub(super) fn shard_path(job: &PackJob<'_>, shard: usize) -> PathBuf {
    job.out.join(format!("{}-{shard:06}.tar", job.prefix))
}
