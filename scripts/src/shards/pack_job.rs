//! A job of packing: its images and settings, what its shards hold, and the file that says so
//! beside them.

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

/// Writes down which job the shards of the prefix are of, or checks that they are of this one.
pub(super) fn claim(job: &PackJob<'_>, contents: &Contents) -> anyhow::Result<()> {
    let this = description(job, contents);
    let mark = mark_of(job);
    let there = || -> anyhow::Result<Option<Value>> {
        match fs::read_to_string(&mark) {
            Ok(text) => serde_json::from_str(&text)
                .map(Some)
                .with_context(|| format!("cannot read {}", mark.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", mark.display())),
        }
    };
    let shard = (0..contents.shards.len()).map(|shard| path_of(job, shard)).find(|path| path.exists());
    match there()? {
        Some(there) if there == this => return Ok(()),
        // A job that has written nothing may begin anew with other flags; another part could be
        // about to write.
        Some(_) if shard.is_none() && job.work == Work::Whole => {
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
            if let Some(path) = shard {
                bail!(PipelineError::Exists { path });
            }
        }
    }
    let is_new = file::create_new(&mark, format!("{this}\n").as_bytes())
        .with_context(|| format!("cannot write {}", mark.display()))?;
    if is_new || there()?.as_ref() == Some(&this) {
        Ok(())
    } else {
        bail!("another job with the prefix {} has just begun in {}", job.prefix, job.out.display())
    }
}

/// Describes a job by everything that affects its shards.
fn description(job: &PackJob<'_>, contents: &Contents) -> Value {
    let mut hash = Xxh3::new();
    for ((key, Sample { entry, .. }), size_bytes) in contents.samples.iter().zip(&contents.sizes_bytes) {
        let line = json!([key, entry.name, entry.class, entry.columns, size_bytes]);
        hash.update(line.to_string().as_bytes());
    }
    contents.shards.iter().for_each(|shard| hash.update(&(shard.end as u64).to_le_bytes()));
    contents.classes.names().into_iter().flatten().for_each(|name| hash.update(name.as_bytes()));
    let input = job.input.canonicalize().unwrap_or_else(|_| job.input.to_path_buf());
    json!({
        "verb": "pack",
        "input": input.display().to_string(),
        "parts": job.work.n_parts(),
        "shards": contents.shards.len(),
        "contents": format!("{:016x}", hash.digest()),
    })
}

/// Path of the file that says which job the shards are of.
pub(super) fn mark_of(job: &PackJob<'_>) -> PathBuf {
    job.out.join(format!("{}.job.json", job.prefix))
}

/// Path of shard number `shard`.
pub(super) fn path_of(job: &PackJob<'_>, shard: usize) -> PathBuf {
    job.out.join(format!("{}-{shard:06}.tar", job.prefix))
}
