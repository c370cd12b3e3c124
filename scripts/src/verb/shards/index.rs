//! `ocelli shards index`: writes indices for shards that other tools wrote.

use std::process::ExitCode;

use pipeline::Storage;
use pipeline::words::counted;
use prep::index::{Indexed, index_shards};
use serde_json::json;

use crate::progress::StageBar;

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
    let indexed = index_shards(&args.shards, args.checksums, args.overwrite, storage, &StageBar::new())?;
    let Indexed { n_shards, n_written, n_samples } = indexed;
    let shards = counted(n_shards as u64, "shard");
    out!("{n_written} of {shards} indexed, {} in total", counted(n_samples, "sample"));
    if args.json {
        out!("{}", json!({ "shards": n_shards, "indexed": n_written, "samples": n_samples }));
    }
    Ok(ExitCode::SUCCESS)
}
