//! `ocelli shards ls`: lists the samples of shards.

use std::process::ExitCode;

use pipeline::Storage;

use crate::console::{one_line, output_lost};
use prep::open::open_shards;

/// Flags of `shards ls`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli shards ls 'data/train-*.tar'")]
pub(crate) struct Args {
    /// Shards: paths, patterns such as 'train-*.tar', folders, or URLs.
    #[arg(required = true)]
    shards: Vec<String>,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    use std::io::Write;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for shard in open_shards(&args.shards, storage)? {
        let name = shard.name();
        let index = shard.index();
        for i in 0..index.len() {
            let members: Vec<String> =
                index.members(i).map(|m| format!("{}:{}", one_line(m.extension), m.len_bytes)).collect();
            let key = one_line(shard.key(i));
            let line = writeln!(out, "{}\t{key}\t{}", one_line(&name), members.join(" "));
            line.unwrap_or_else(|error| output_lost(&error));
        }
    }
    out.flush().unwrap_or_else(|error| output_lost(&error));
    Ok(ExitCode::SUCCESS)
}
