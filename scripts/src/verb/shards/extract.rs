//! `ocelli shards extract`: writes members of shards as files.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use pipeline::shard::leads_out_of_folder;
use pipeline::{PipelineError, Shard, Storage};
use serde_json::json;

use crate::progress::bar;
use prep::classes::copy_classes;
use prep::rewrite::check_names;

/// Flags of `shards extract`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli shards extract data/ --out files/")]
pub(crate) struct Args {
    /// Shards: paths, patterns such as 'train-*.tar', folders, or URLs.
    #[arg(required = true)]
    shards: Vec<String>,
    /// Output folder for the files, with one sub-folder per shard.
    #[arg(long)]
    out: PathBuf,
    /// Extract only samples with these keys.
    #[arg(long, num_args = 1..)]
    keys: Vec<String>,
    /// Replace existing files.
    #[arg(long)]
    overwrite: bool,
    /// Print a line of JSON at the end.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let sources = storage.sources(&args.shards)?;
    check_names(&sources)?;
    let wanted: HashSet<&str> = args.keys.iter().map(|key| key.strip_prefix("./").unwrap_or(key)).collect();
    let progress = bar(sources.len() as u64, "extract");
    let mut n_samples = 0u64;
    let mut n_files = 0u64;
    for source in &sources {
        let shard = storage.open(source)?;
        let name = source.url.tar_name();
        let folder = args.out.join(name.strip_suffix(".tar").unwrap_or(&name));
        for i in (0..shard.len()).filter(|i| wanted.is_empty() || wanted.contains(shard.key(*i))) {
            for (extension, bytes) in shard.members(i)? {
                let target = inside(&shard, &folder, format!("{}.{extension}", shard.key(i)))?;
                write(&target, &bytes, args.overwrite)?;
                n_files += 1;
            }
            n_samples += 1;
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    copy_classes(&sources, &args.out, args.overwrite)?;
    if n_samples == 0 && !wanted.is_empty() {
        bail!("none of the {} keys was found in the {} shard(s)", wanted.len(), sources.len());
    }
    out!("{n_files} files from {n_samples} samples in {}", args.out.display());
    if args.json {
        out!("{}", json!({ "samples": n_samples, "files": n_files }));
    }
    Ok(ExitCode::SUCCESS)
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

fn write(target: &Path, bytes: &[u8], overwrite: bool) -> anyhow::Result<()> {
    if target.exists() && !overwrite {
        bail!("{} exists; pass --overwrite or choose another --out", target.display());
    }
    if let Some(folder) = target.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    pipeline::file::replace_unsynced(target, bytes)
        .with_context(|| format!("cannot write {}", target.display()))
}
