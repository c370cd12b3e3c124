//! `ocelli shards extract`: writes members of shards as files.

use std::path::PathBuf;
use std::process::ExitCode;

use pipeline::Storage;
use pipeline::words::counted;
use prep::extract::{Extracted, extract};
use prep::rewrite::RewriteJob;
use serde_json::json;

use crate::progress::StageBar;

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
    let job = RewriteJob { shards: &args.shards, out: &args.out, overwrite: args.overwrite };
    let Extracted { n_samples, n_files } = extract(&job, &args.keys, storage, &StageBar::new())?;
    let files = counted(n_files, "file");
    out!("{files} from {} in {}", counted(n_samples, "sample"), args.out.display());
    if args.json {
        out!("{}", json!({ "samples": n_samples, "files": n_files }));
    }
    Ok(ExitCode::SUCCESS)
}
