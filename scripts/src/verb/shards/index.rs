//! `ocelli shards index`: writes indices for shards that other tools wrote.

use std::process::ExitCode;

use pipeline::url::ShardUrl;
use pipeline::{Source, Storage};
use rayon::prelude::*;
use serde_json::json;

use crate::progress::bar;
use pipeline::shard::sidecar;

/// Flags of `shards index`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli shards index data/ --checksums")]
pub(crate) struct Args {
    /// Shards: paths, patterns, folders, or URLs. The index of a local shard is written beside it,
    /// others into the cache.
    #[arg(required = true)]
    shards: Vec<String>,
    /// Read local shards completely, to add checksums that detect later changes.
    #[arg(long)]
    checksums: bool,
    /// Rebuild indices that exist already.
    #[arg(long)]
    overwrite: bool,
    /// End with one line of JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let sources = storage.sources(&args.shards)?;
    let progress = bar(sources.len() as u64, "index");
    let done: anyhow::Result<Vec<_>> = sources
        .par_iter()
        .map(|source| -> anyhow::Result<(u64, u64)> {
            let done = match &source.url {
                ShardUrl::File(path) if source.is_read_in_place() => beside(args, path)?,
                _ => in_cache(args, source, storage)?,
            };
            progress.inc(1);
            Ok(done)
        })
        .collect();
    progress.finish_and_clear();
    let (n_samples, n_written) = done?.iter().fold((0, 0), |(a, b), (n, written)| (a + n, b + written));
    out!("{n_written} of {} shard(s) indexed, {n_samples} samples in all", sources.len());
    if args.json {
        out!("{}", json!({ "shards": sources.len(), "indexed": n_written, "samples": n_samples }));
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the index of the shard at `path`, if needed; returns its number of samples, and 1 if it
/// was written.
fn beside(args: &Args, path: &std::path::Path) -> anyhow::Result<(u64, u64)> {
    let known = if args.overwrite { None } else { sidecar::load(path).ok().flatten() };
    if let Some(known) = &known {
        let has_checksums = known.checksum.is_some();
        let is_current = sidecar::current_checksum(path).is_some();
        if is_current || (!has_checksums && !args.checksums) {
            let index = sidecar::open(path)?;
            if index == *known {
                // It has been compared with the shard: later commands need not do so again.
                sidecar::touch(path);
                return Ok((index.len() as u64, 0));
            }
        }
    }
    // An index with checksums is replaced by one with checksums: it may be that of another file.
    let wants_checksums = args.checksums || known.is_some_and(|known| known.checksum.is_some());
    let index = if wants_checksums { sidecar::build_checked(path)? } else { sidecar::build(path)? };
    sidecar::save(&index, path)?;
    Ok((index.len() as u64, 1))
}

fn in_cache(args: &Args, source: &Source, storage: &Storage) -> anyhow::Result<(u64, u64)> {
    if args.overwrite {
        storage.forget(source)?;
    }
    let there = storage.has_index(source)?;
    Ok((storage.open(source)?.len() as u64, u64::from(!there)))
}
