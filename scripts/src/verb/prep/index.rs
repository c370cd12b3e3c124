//! `ocelli shards index`: sidecars for shards that other tools wrote.

use std::process::ExitCode;

use pipeline::index::ShardIndex;
use rayon::prelude::*;
use serde_json::json;

use crate::progress::bar;

/// Flags of `shards index`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Shard lists.
    #[arg(required = true)]
    shards: Vec<String>,
    /// Make sidecars again that are there already.
    #[arg(long)]
    overwrite: bool,
    /// End with one line of JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let paths = pipeline::url::expand(&args.shards)?;
    let progress = bar(paths.len() as u64, "index");
    let one = |path: &std::path::PathBuf| -> anyhow::Result<(u64, u64)> {
        let index = if args.overwrite { ShardIndex::build(path)? } else { ShardIndex::open(path)? };
        // A sidecar of another length was not believed, and is written again.
        let sidecar = std::fs::read(ShardIndex::sidecar_path(path)).ok();
        let there = !args.overwrite
            && sidecar.and_then(|text| ShardIndex::parse(&text).ok()).is_some_and(|known| known == index);
        if !there {
            index.save(path)?;
        }
        progress.inc(1);
        Ok((index.len() as u64, u64::from(!there)))
    };
    let done: anyhow::Result<Vec<_>> = paths.par_iter().map(one).collect();
    progress.finish_and_clear();
    let (n_samples, n_written) = done?.iter().fold((0, 0), |(a, b), (n, written)| (a + n, b + written));
    println!("{n_written} of {} shard(s) indexed, {n_samples} samples in all", paths.len());
    if args.json {
        println!("{}", json!({ "shards": paths.len(), "indexed": n_written, "samples": n_samples }));
    }
    Ok(ExitCode::SUCCESS)
}
