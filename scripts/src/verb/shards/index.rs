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
    /// Shards: paths, patterns, folders, or URLs. The index of a local shard is written next to it,
    /// those of remote shards into the cache.
    #[arg(required = true)]
    shards: Vec<String>,
    /// Read local shards completely and add checksums, to detect later changes.
    #[arg(long)]
    checksums: bool,
    /// Rebuild existing indices.
    #[arg(long)]
    overwrite: bool,
    /// Print a line of JSON at the end.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let sources = storage.sources(&args.shards)?;
    let progress = bar(sources.len() as u64, "index");
    let counts: anyhow::Result<Vec<_>> = sources
        .par_iter()
        .map(|source| -> anyhow::Result<(u64, u64)> {
            let counts = match &source.url {
                ShardUrl::File(path) if source.is_read_in_place() => index_local(args, path)?,
                _ => index_remote(args, source, storage)?,
            };
            progress.inc(1);
            Ok(counts)
        })
        .collect();
    progress.finish_and_clear();
    let mut n_samples = 0;
    let mut n_written = 0;
    for (samples, written) in counts? {
        n_samples += samples;
        n_written += written;
    }
    out!("{n_written} of {} shard(s) indexed, {n_samples} samples in total", sources.len());
    if args.json {
        out!("{}", json!({ "shards": sources.len(), "indexed": n_written, "samples": n_samples }));
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the index of the shard at `path`, if needed; returns its number of samples, and 1 if it
/// was written.
fn index_local(args: &Args, path: &std::path::Path) -> anyhow::Result<(u64, u64)> {
    let known = if args.overwrite { None } else { sidecar::load(path).ok().flatten() };
    if let Some(known) = &known {
        let has_checksums = known.checksum.is_some();
        let is_current = sidecar::current_checksum(path).is_some();
        if is_current || (!has_checksums && !args.checksums) {
            let index = sidecar::open(path)?;
            if index == *known {
                // The index was compared with the shard: later commands need not compare again.
                sidecar::touch(path);
                return Ok((index.len() as u64, 0));
            }
        }
    }
    // An index with checksums, which may be that of another file, is replaced by one with
    // checksums.
    let wants_checksums = args.checksums || known.is_some_and(|known| known.checksum.is_some());
    let index = if wants_checksums { sidecar::build_checked(path)? } else { sidecar::build(path)? };
    sidecar::save(&index, path)?;
    Ok((index.len() as u64, 1))
}

/// Writes the index of a shard into the cache, if needed; returns its number of samples, and 1 if
/// it was written.
fn index_remote(args: &Args, source: &Source, storage: &Storage) -> anyhow::Result<(u64, u64)> {
    if args.overwrite {
        storage.forget(source)?;
    }
    let existed = storage.has_index(source)?;
    Ok((storage.open(source)?.len() as u64, u64::from(!existed)))
}
