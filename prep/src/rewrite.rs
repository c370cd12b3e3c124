//! Rewriting of shards one by one: the loop of `shards resize`, `filter` and `dedup`.
//!
//! An output shard has the name of its input, and gets it when it is complete. Shards that exist
//! are skipped, so that a job that was stopped continues where it was; `job.json` makes sure that
//! it is the same job. A shard none of whose samples are kept is not written.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use pipeline::shard::image::{compare_names, is_band};
use pipeline::shard::{IMAGE_EXTENSIONS, MASK_EXTENSIONS};
use pipeline::url::ShardUrl;
use pipeline::{Progress, Shard, Source, Storage, file};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::classes::ClassNames;
use crate::error::PrepError;
use crate::folder_lock::{FolderLock, lock_folder};
use crate::job::Job;
use crate::lazy_shard::LazyShard;
use crate::parts::remove_parts;

/// File in an output folder that describes the job.
pub const JOB_FILE: &str = "job.json";

/// Number of samples that are read, processed on all cores and written at a time.
const CHUNK: usize = 256;

/// A sample of a shard.
pub(crate) struct Item<'a> {
    /// Shard of the sample.
    pub(crate) shard: &'a Shard,
    /// Position in the shard.
    pub(crate) index: usize,
    /// Members: extension and bytes.
    pub(crate) members: Vec<(String, Vec<u8>)>,
}

/// Decision about a sample.
pub(crate) enum Verdict {
    /// Write the sample unchanged.
    Keep,
    /// Write the sample with these members in place of others.
    Replace(Vec<NewMember>),
    /// Leave the sample out, for this reason.
    Drop(String),
}

/// A member that takes the place of another one.
pub(crate) struct NewMember {
    /// Extension of the member that it replaces.
    pub(crate) replaced: String,
    pub(crate) extension: String,
    pub(crate) bytes: Vec<u8>,
}

/// Counts of a job.
#[derive(Default)]
pub struct RewriteTotals {
    /// Number of shards that were written.
    pub n_shards: u64,
    /// Number of output shards that existed before.
    pub n_existing_shards: u64,
    /// Number of samples that were written unchanged.
    pub n_kept: u64,
    /// Number of samples of which members were replaced.
    pub n_replaced: u64,
    /// Number of samples that were left out.
    pub n_dropped: u64,
    /// Bytes of the members that were read.
    pub bytes_in: u64,
    /// Bytes of the members that were written.
    pub bytes_out: u64,
    /// File that lists the samples that were left out, if any.
    pub list: Option<PathBuf>,
}

impl RewriteTotals {
    /// Returns the counts as JSON.
    pub fn to_json(&self) -> Value {
        json!({
            "shards": self.n_shards,
            "shards_there": self.n_existing_shards,
            "kept": self.n_kept,
            "changed": self.n_replaced,
            "dropped": self.n_dropped,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
        })
    }
}

/// Shards to rewrite or to extract, and where to.
pub struct RewriteJob<'a> {
    /// The shards: paths, patterns, folders, or URLs.
    pub shards: &'a [String],
    /// Folder of the outputs.
    pub out: &'a Path,
    /// `true` if the output of an earlier job is deleted.
    pub overwrite: bool,
}

/// Output folder of a job, and what identifies the job.
pub(crate) struct Output<'a> {
    /// Folder of the outputs.
    pub(crate) out: &'a Path,
    /// Name of the verb.
    pub(crate) verb: &'static str,
    /// All settings that affect the output.
    pub(crate) settings: Value,
    /// `true` if the output of an earlier job is deleted.
    pub(crate) overwrite: bool,
}

impl Item<'_> {
    /// Returns the image of the sample: extension and bytes.
    pub(crate) fn image(&self) -> Option<&(String, Vec<u8>)> {
        IMAGE_EXTENSIONS.iter().find_map(|wanted| self.members.iter().find(|(ext, _)| ext == wanted))
    }

    /// Returns the mask of the sample: extension and bytes.
    pub(crate) fn mask(&self) -> Option<&(String, Vec<u8>)> {
        MASK_EXTENSIONS.iter().find_map(|wanted| self.members.iter().find(|(ext, _)| ext == wanted))
    }

    /// Returns the files of the sample's image: one, or one for each band.
    pub(crate) fn files(&self) -> Vec<&[u8]> {
        if let Some((_, bytes)) = self.image() {
            return vec![bytes];
        }
        let mut bands: Vec<&(String, Vec<u8>)> =
            self.members.iter().filter(|(extension, _)| is_band(extension)).collect();
        bands.sort_by(|(a, _), (b, _)| compare_names(a, b));
        bands.into_iter().map(|(_, bytes)| bytes.as_slice()).collect()
    }

    /// Returns the key of the sample.
    fn key(&self) -> &str {
        self.shard.key(self.index)
    }
}

/// Passes every sample of `sources` to `judge`, on all cores, and writes it accordingly.
///
/// # Errors
/// [`PrepError`] when the folder belongs to another job, or when shards cannot be read or written.
pub(crate) fn rewrite(
    sources: &[Source],
    storage: &Storage,
    job: &Output<'_>,
    progress: &dyn Progress,
    judge: impl Fn(&Item<'_>) -> Verdict + Sync,
) -> Result<RewriteTotals, PrepError> {
    check_names(sources)?;
    let shards = storage.open_all(sources)?;
    let lock = lock_folder(job.out)?;
    rewrite_locked(sources, &shards, job, &lock, progress, judge)
}

/// Does what [`rewrite`] does, with `shards`, the opened `sources`, in a folder that this process
/// has locked.
///
/// # Errors
/// Those of [`rewrite`].
pub(crate) fn rewrite_locked(
    sources: &[Source],
    shards: &[Shard],
    job: &Output<'_>,
    _lock: &FolderLock,
    progress: &dyn Progress,
    judge: impl Fn(&Item<'_>) -> Verdict + Sync,
) -> Result<RewriteTotals, PrepError> {
    // Before the folder is claimed: lists of classes may differ.
    let classes = ClassNames::read(sources)?;
    claim(input_identities(sources, shards, job.out)?, job.out, job.verb, &job.settings, job.overwrite)?;
    classes.copy(job.out, job.overwrite)?;
    let mut totals = RewriteTotals::default();
    progress.begin(job.verb, shards.iter().map(|shard| shard.len() as u64).sum());
    for (shard, source) in shards.iter().zip(sources) {
        let target = job.out.join(source.url.tar_name());
        if is_done(&target, shard.len()) {
            totals.n_existing_shards += 1;
            progress.advance(shard.len() as u64);
            continue;
        }
        rewrite_shard(shard, &target, &judge, &mut totals, progress)?;
    }
    totals.list = join_dropped(job.out, sources)?;
    Ok(totals)
}

/// Returns whether a shard of `n_samples` is done: `target` exists, or its list of dropped samples
/// names all of them, and a shard without samples is not written.
fn is_done(target: &Path, n_samples: usize) -> bool {
    if target.exists() {
        return true;
    }
    let dropped = fs::read_to_string(dropped_path(target)).unwrap_or_default();
    n_samples > 0 && dropped.lines().count() == n_samples
}

/// Rewrites `shard` to `target`, unless no sample of it is kept.
fn rewrite_shard(
    shard: &Shard,
    target: &Path,
    judge: &(impl Fn(&Item<'_>) -> Verdict + Sync),
    totals: &mut RewriteTotals,
    progress: &dyn Progress,
) -> Result<(), PrepError> {
    let mut writer = LazyShard::new(target.to_path_buf());
    let mut dropped = Vec::new();
    for start in (0..shard.len()).step_by(CHUNK) {
        let chunk = start..shard.len().min(start + CHUNK);
        let verdicts: Result<Vec<_>, PrepError> = chunk
            .into_par_iter()
            .map(|index: usize| -> Result<(Item<'_>, Verdict), PrepError> {
                match shard.members(index) {
                    Ok(members) => {
                        let item = Item { shard, index, members };
                        let verdict = judge(&item);
                        Ok((item, verdict))
                    }
                    // The bytes differ from those that were indexed: the sample must not be copied.
                    Err(error) if error.is_sample_error() => {
                        let item = Item { shard, index, members: Vec::new() };
                        Ok((item, Verdict::Drop(error.to_string())))
                    }
                    Err(error) => Err(error.into()),
                }
            })
            .collect();
        for (mut item, verdict) in verdicts? {
            progress.advance(1);
            totals.bytes_in += total_bytes(&item.members);
            let members = match verdict {
                Verdict::Drop(reason) => {
                    totals.n_dropped += 1;
                    dropped.push(json!({ "shard": shard.name(), "key": item.key(), "reason": reason }));
                    continue;
                }
                Verdict::Keep => {
                    totals.n_kept += 1;
                    std::mem::take(&mut item.members)
                }
                Verdict::Replace(new) => {
                    totals.n_replaced += 1;
                    replace_members(std::mem::take(&mut item.members), new)
                }
            };
            totals.bytes_out += total_bytes(&members);
            let members: Vec<(&str, &[u8])> =
                members.iter().map(|(ext, bytes)| (ext.as_str(), bytes.as_slice())).collect();
            writer.file()?.add(item.key(), &members)?;
        }
    }
    // The list is written first, so that a complete shard has its list.
    let text: String = dropped.iter().flat_map(|row: &Value| [row.to_string(), "\n".into()]).collect();
    let list = dropped_path(target);
    file::replace(&list, text.as_bytes()).map_err(|error| PrepError::file_system(&list, error))?;
    if writer.finish()? {
        totals.n_shards += 1;
    }
    Ok(())
}

fn total_bytes(members: &[(String, Vec<u8>)]) -> u64 {
    members.iter().map(|(_, bytes)| bytes.len() as u64).sum()
}

/// Returns `members` with those of `new` in the places of the ones that they replace.
fn replace_members(mut members: Vec<(String, Vec<u8>)>, new: Vec<NewMember>) -> Vec<(String, Vec<u8>)> {
    for NewMember { replaced, extension, bytes } in new {
        if let Some(member) = members.iter_mut().find(|(known, _)| *known == replaced) {
            *member = (extension, bytes);
        }
    }
    members
}

/// Returns the path of the list of dropped samples beside a shard.
fn dropped_path(target: &Path) -> PathBuf {
    target.with_extension("dropped.jsonl")
}

/// Joins the lists of all shards into `dropped.jsonl`.
fn join_dropped(out: &Path, sources: &[Source]) -> Result<Option<PathBuf>, PrepError> {
    let mut text = String::new();
    for source in sources {
        text.push_str(
            &fs::read_to_string(dropped_path(&out.join(source.url.tar_name()))).unwrap_or_default(),
        );
    }
    let list = out.join("dropped.jsonl");
    if text.is_empty() {
        return Ok(None);
    }
    file::replace(&list, text.as_bytes()).map_err(|error| PrepError::io("write", &list, error))?;
    Ok(Some(list))
}

/// Identifies the inputs of a job: location and length of each shard.
///
/// # Errors
/// [`PrepError::InOutput`] if a shard is in the folder `out`, or [`PrepError::Io`].
pub fn input_identities(sources: &[Source], shards: &[Shard], out: &Path) -> Result<Vec<Value>, PrepError> {
    let real_out = out.canonicalize().ok();
    let mut inputs = Vec::new();
    for (source, shard) in sources.iter().zip(shards) {
        let name = match &source.url {
            ShardUrl::File(path) => {
                let real = path.canonicalize().map_err(|error| PrepError::io("open", path, error))?;
                if real_out.is_some() && real.parent() == real_out.as_deref() {
                    return Err(PrepError::InOutput { path: path.clone() });
                }
                real.display().to_string()
            }
            url => url.to_string(),
        };
        inputs.push(json!([name, shard.index().shard_bytes]));
    }
    Ok(inputs)
}

/// Creates the output folder, or checks that it belongs to this job: the same verb with the same
/// settings on the same inputs. With `overwrite`, the output of an earlier job is deleted.
///
/// # Errors
/// [`PrepError::OtherJob`], [`PrepError::OtherShards`], or [`PrepError::Io`].
pub fn claim(
    inputs: Vec<Value>,
    out: &Path,
    verb: &str,
    settings: &Value,
    overwrite: bool,
) -> Result<(), PrepError> {
    fs::create_dir_all(out).map_err(|error| PrepError::io("create", out, error))?;
    let mark = out.join(JOB_FILE);
    let this = Job(json!({ "verb": verb, "settings": settings, "inputs": inputs }));
    let recorded = match Job::read(&mark) {
        // A damaged description is overwritten, too.
        Err(PrepError::Json { .. }) if overwrite => Some(Job(Value::Null)),
        recorded => recorded?,
    };
    match recorded {
        Some(other) if overwrite => {
            remove_parts(out, other.verb().unwrap_or(verb))?;
            clear(out)?;
        }
        Some(other) if other == this => return Ok(()),
        Some(other) => {
            let verb = other.verb().unwrap_or("unknown").to_string();
            return Err(PrepError::OtherJob { out: out.to_path_buf(), verb });
        }
        None if outputs(out)?.is_empty() => {}
        None => return Err(PrepError::OtherShards { out: out.to_path_buf() }),
    }
    this.replace(&mark)
}

/// Returns the files in `out` that have names of jobs' outputs.
fn outputs(out: &Path) -> Result<Vec<PathBuf>, PrepError> {
    const EXTENSIONS: [&str; 5] = [".tar", ".tar.tmp", ".tar.idx.json", ".dropped.jsonl", ".failures.jsonl"];
    let entries = fs::read_dir(out).map_err(|error| PrepError::file_system(out, error))?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(|error| PrepError::file_system(out, error))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if EXTENSIONS.iter().any(|extension| name.ends_with(extension)) {
            paths.push(path);
        }
    }
    Ok(paths)
}

/// Deletes the output of an earlier job, `job.json` last.
fn clear(out: &Path) -> Result<(), PrepError> {
    for path in outputs(out)? {
        fs::remove_file(&path).map_err(|error| PrepError::io("remove", &path, error))?;
    }
    fs::remove_file(out.join(JOB_FILE)).map_err(|error| PrepError::io("remove", Path::new(JOB_FILE), error))
}

/// Checks that the names of the inputs differ, because the outputs have them too.
///
/// # Errors
/// [`PrepError::SameNames`].
pub(crate) fn check_names(sources: &[Source]) -> Result<(), PrepError> {
    let mut names = HashSet::new();
    match sources.iter().find(|source| !names.insert(source.url.tar_name())) {
        Some(source) => Err(PrepError::SameNames { shard: source.url.to_string() }),
        None => Ok(()),
    }
}
