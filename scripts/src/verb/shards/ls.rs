//! `ocelli shards ls`: the samples of shards.

use std::process::ExitCode;

use pipeline::Storage;

use crate::console::output_lost;

/// Flags of `shards ls`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli shards ls 'data/train-*.tar'")]
pub(crate) struct Args {
    /// Shard lists.
    #[arg(required = true)]
    shards: Vec<String>,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    use std::io::Write;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for shard in storage.open_all(&storage.sources(&args.shards)?)? {
        let (name, index) = (shard.name(), shard.index());
        for i in 0..index.len() {
            let members: Vec<String> =
                index.members(i).map(|m| format!("{}:{}", m.extension, m.len_bytes)).collect();
            let line = writeln!(out, "{name}\t{}\t{}", index.key(i), members.join(" "));
            line.unwrap_or_else(|error| output_lost(&error));
        }
    }
    out.flush().unwrap_or_else(|error| output_lost(&error));
    Ok(ExitCode::SUCCESS)
}
