//! Rewriting of shards one by one: the loop of `shards resize`, `filter` and `dedup`.
//!
//! An output shard has the name of its input, and gets it when it is complete. Shards that exist
//! are skipped, so that a job that was stopped continues where it was; `job.json` makes sure that
//! it is the same job.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use indicatif::ProgressBar;
use pipeline::shard::image::{compare_names, is_band};
use pipeline::shard::write::ShardFile;
use pipeline::url::ShardUrl;
use pipeline::{Shard, Source, Storage, file};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::parts::remove_parts;
use crate::progress::bar;
use crate::shards::classes::copy_classes;
use crate::shards::folder_lock::lock_folder;

/// Number of samples that are read, processed on all cores and written at a time.
const CHUNK: usize = 256;

/// Flags of every verb that rewrites shards.
#[derive(clap::Args)]
pub(crate) struct RewriteFlags {
    /// Shards: paths, patterns such as 'train-*.tar', folders, or URLs.
    #[arg(required = true)]
    pub(crate) shards: Vec<String>,
    /// Folder that receives the shards, which keep their names, and lists.
    #[arg(long)]
    pub(crate) out: PathBuf,
    /// Start over in a folder that holds the output of another job of this kind, which is deleted.
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// End with one line of JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// A sample of a shard.
pub(crate) struct Item<'a> {
    /// Shard of the sample.
    pub(crate) shard: &'a Shard,
    /// Position in the shard.
    pub(crate) number: usize,
    /// Members: extension and bytes.
    pub(crate) members: Vec<(String, Vec<u8>)>,
}

/// Decision about a sample.
pub(crate) enum Verdict {
    /// Write the sample unchanged.
    Keep,
    /// Write the sample with another image: extension and bytes.
    Replace(&'static str, Vec<u8>),
    /// Leave the sample out, for this reason.
    Drop(String),
}

/// Counts of a job.
#[derive(Default)]
pub(crate) struct RewriteTotals {
    pub(crate) n_shards: u64,
    /// Number of output shards that existed before.
    pub(crate) n_existing_shards: u64,
    pub(crate) n_kept: u64,
    pub(crate) n_replaced: u64,
    pub(crate) n_dropped: u64,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
    /// File that lists the samples that were left out, if any.
    pub(crate) list: Option<PathBuf>,
}

/// Output folder and identity of a job.
pub(crate) struct Job<'a> {
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
        use pipeline::shard::IMAGE_EXTENSIONS;
        IMAGE_EXTENSIONS.iter().find_map(|wanted| self.members.iter().find(|(ext, _)| ext == wanted))
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
    pub(crate) fn key(&self) -> &str {
        self.shard.key(self.number)
    }
}

/// Passes every sample of `sources` to `judge`, on all cores, and writes it accordingly.
pub(crate) fn rewrite(
    sources: &[Source],
    storage: &Storage,
    job: &Job<'_>,
    judge: impl Fn(&Item<'_>) -> Verdict + Sync,
) -> anyhow::Result<RewriteTotals> {
    check_names(sources)?;
    let shards = storage.open_all(sources)?;
    let _lock = lock_folder(job.out)?;
    claim(input_identities(sources, &shards, job.out)?, job.out, job.verb, &job.settings, job.overwrite)?;
    copy_classes(sources, job.out, job.overwrite)?;
    let mut totals = RewriteTotals::default();
    let progress = bar(shards.iter().map(|shard| shard.len() as u64).sum(), job.verb);
    for (shard, source) in shards.iter().zip(sources) {
        let target = job.out.join(source.url.tar_name());
        if target.exists() {
            totals.n_existing_shards += 1;
            progress.inc(shard.len() as u64);
            continue;
        }
        rewrite_shard(shard, &target, &judge, &mut totals, &progress)?;
        totals.n_shards += 1;
    }
    progress.finish_and_clear();
    totals.list = join_dropped(job.out, sources)?;
    Ok(totals)
}

/// Rewrites `shard` to `target`.
fn rewrite_shard(
    shard: &Shard,
    target: &Path,
    judge: &(impl Fn(&Item<'_>) -> Verdict + Sync),
    totals: &mut RewriteTotals,
    progress: &ProgressBar,
) -> anyhow::Result<()> {
    let mut writer = ShardFile::create(target)?;
    let mut dropped = Vec::new();
    for start in (0..shard.len()).step_by(CHUNK) {
        let chunk = start..shard.len().min(start + CHUNK);
        let verdicts: anyhow::Result<Vec<_>> = chunk
            .into_par_iter()
            .map(|number: usize| -> anyhow::Result<(Item<'_>, Verdict)> {
                match shard.members(number) {
                    Ok(members) => {
                        let item = Item { shard, number, members };
                        let verdict = judge(&item);
                        Ok((item, verdict))
                    }
                    // The bytes differ from those that were indexed: the sample must not be copied.
                    Err(error) if error.is_sample_error() => {
                        let item = Item { shard, number, members: Vec::new() };
                        Ok((item, Verdict::Drop(error.to_string())))
                    }
                    Err(error) => Err(error.into()),
                }
            })
            .collect();
        for (mut item, verdict) in verdicts? {
            progress.inc(1);
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
                Verdict::Replace(extension, bytes) => {
                    totals.n_replaced += 1;
                    replace_image(&item, extension, bytes)
                }
            };
            totals.bytes_out += total_bytes(&members);
            let members: Vec<(&str, &[u8])> =
                members.iter().map(|(ext, bytes)| (ext.as_str(), bytes.as_slice())).collect();
            writer.add(item.key(), &members)?;
        }
    }
    // The list is written first, so that a complete shard has its list.
    let text: String = dropped.iter().flat_map(|row: &Value| [row.to_string(), "\n".into()]).collect();
    file::replace(&dropped_path(target), text.as_bytes())?;
    writer.finish()?;
    Ok(())
}

fn total_bytes(members: &[(String, Vec<u8>)]) -> u64 {
    members.iter().map(|(_, bytes)| bytes.len() as u64).sum()
}

/// Returns the members of `item` with its image replaced in place.
fn replace_image(item: &Item<'_>, extension: &str, bytes: Vec<u8>) -> Vec<(String, Vec<u8>)> {
    let old = item.image().map(|(old, _)| old.clone()).unwrap_or_default();
    let mut bytes = Some(bytes);
    item.members
        .iter()
        .map(|(ext, data)| match bytes.take_if(|_| *ext == old) {
            Some(new) => (extension.to_string(), new),
            None => (ext.clone(), data.clone()),
        })
        .collect()
}

/// Returns the path of the list of dropped samples beside a shard.
fn dropped_path(target: &Path) -> PathBuf {
    target.with_extension("dropped.jsonl")
}

/// Joins the lists of all shards into `dropped.jsonl`.
fn join_dropped(out: &Path, sources: &[Source]) -> anyhow::Result<Option<PathBuf>> {
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
    file::replace(&list, text.as_bytes()).with_context(|| format!("cannot write {}", list.display()))?;
    Ok(Some(list))
}

/// Identifies the inputs of a job: location and length of each shard.
pub(crate) fn input_identities(
    sources: &[Source],
    shards: &[Shard],
    out: &Path,
) -> anyhow::Result<Vec<Value>> {
    let real_out = out.canonicalize().ok();
    let mut inputs = Vec::new();
    for (source, shard) in sources.iter().zip(shards) {
        let name = match &source.url {
            ShardUrl::File(path) => {
                let real = path.canonicalize().with_context(|| format!("cannot open {}", path.display()))?;
                if real_out.is_some() && real.parent() == real_out.as_deref() {
                    bail!("{} is in the output folder; choose another --out", path.display());
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
pub(crate) fn claim(
    inputs: Vec<Value>,
    out: &Path,
    verb: &str,
    settings: &Value,
    overwrite: bool,
) -> anyhow::Result<()> {
    fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    let mark = out.join("job.json");
    let this = json!({ "verb": verb, "settings": settings, "inputs": inputs });
    match fs::read_to_string(&mark) {
        Ok(text) if overwrite => {
            let existing: Value = serde_json::from_str(&text).unwrap_or_default();
            remove_parts(out, existing["verb"].as_str().unwrap_or(verb))?;
            clear(out)?;
        }
        Ok(text) => {
            let existing: Value =
                serde_json::from_str(&text).with_context(|| format!("cannot read {}", mark.display()))?;
            if existing != this {
                bail!(
                    "{} holds another job ({}), or the same one with other inputs, flags or number of parts; choose another --out",
                    out.display(),
                    existing["verb"].as_str().unwrap_or("unknown")
                );
            }
            return Ok(());
        }
        Err(_) if outputs(out)?.is_empty() => {}
        Err(_) => bail!("{} has shards of another job; choose another --out", out.display()),
    }
    file::replace(&mark, format!("{this}\n").as_bytes())
        .with_context(|| format!("cannot write {}", mark.display()))
}

/// Returns the files in `out` that have names of jobs' outputs.
fn outputs(out: &Path) -> anyhow::Result<Vec<PathBuf>> {
    const EXTENSIONS: [&str; 5] = [".tar", ".tar.tmp", ".tar.idx.json", ".dropped.jsonl", ".failures.jsonl"];
    let entries: std::io::Result<Vec<_>> = fs::read_dir(out)?.collect();
    let mut paths: Vec<PathBuf> = entries?.into_iter().map(|entry| entry.path()).collect();
    paths.retain(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        EXTENSIONS.iter().any(|extension| name.ends_with(extension))
    });
    Ok(paths)
}

/// Deletes the output of an earlier job, `job.json` last.
fn clear(out: &Path) -> anyhow::Result<()> {
    for path in outputs(out)? {
        fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    fs::remove_file(out.join("job.json")).context("cannot remove job.json")
}

/// Checks that the names of the inputs differ, because the outputs have them too.
pub(crate) fn check_names(sources: &[Source]) -> anyhow::Result<()> {
    let mut names = HashSet::new();
    match sources.iter().find(|source| !names.insert(source.url.tar_name())) {
        Some(source) => bail!("two input shards are both named {}; use two folders", source.url),
        None => Ok(()),
    }
}

impl RewriteTotals {
    /// Prints the counts.
    pub(crate) fn print(&self, json: bool) {
        let existing = match self.n_existing_shards {
            0 => String::new(),
            n => format!(", {n} there already"),
        };
        out!(
            "{} shard(s) written{existing}: {} samples as they were, {} changed, {} left out; {:.1} MB of {:.1} MB",
            self.n_shards,
            self.n_kept,
            self.n_replaced,
            self.n_dropped,
            self.bytes_out as f64 / 1e6,
            self.bytes_in as f64 / 1e6
        );
        if let Some(list) = &self.list {
            out!("why they were left out: {}", list.display());
        }
        if json {
            out!(
                "{}",
                json!({
                    "shards": self.n_shards,
                    "shards_there": self.n_existing_shards,
                    "kept": self.n_kept,
                    "changed": self.n_replaced,
                    "dropped": self.n_dropped,
                    "bytes_in": self.bytes_in,
                    "bytes_out": self.bytes_out,
                })
            );
        }
    }
}
