//! `ocelli shards verify`: checks every byte, every member, every image.

use std::path::PathBuf;
use std::process::ExitCode;

use augment::{DecodeRules, Fill};
use pipeline::Storage;
use pipeline::words::{counted, thousands};
use prep::parts::ReadJob;
use prep::verify::verify;
use serde_json::json;

use crate::exit::DATA;
use crate::network_flags::ValueFlags;
use crate::parts::{PartFlags, result_of_all};
use crate::progress::StageBar;

/// Flags of `shards verify`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli shards verify data/\n  ocelli shards verify data/ --part 3/16 --out \
        parts/\n  ocelli shards verify data/ --join 16 --out parts/"
)]
pub(crate) struct Args {
    /// Shards: paths, patterns such as 'train-*.tar', folders, or URLs.
    #[arg(required = true)]
    shards: Vec<String>,
    #[command(flatten)]
    values: ValueFlags,
    #[command(flatten)]
    parts: PartFlags,
    /// Output folder for the results of parts.
    #[arg(long, value_name = "FOLDER", help_heading = "In parts")]
    out: Option<PathBuf>,
    /// Print a line of JSON at the end.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let rules = DecodeRules {
        bits_used: args.values.bits_used,
        no_data: args.values.no_data(Fill::default()),
        ..DecodeRules::default()
    };
    let work = args.parts.work();
    let job = ReadJob { specs: &args.shards, rules: &rules, work, out: args.out.as_deref() };
    let progress = StageBar::new();
    let share = verify(&job, storage, &progress, &|flaw| progress.say(&format!("bad: {flaw}")))?;
    drop(progress);
    let Some(verified) = result_of_all(share) else { return Ok(ExitCode::SUCCESS) };
    out!(
        "{}, {} bad; {}, {:.1} MB of images, {} bad",
        counted(verified.n_shards as u64, "shard"),
        verified.n_bad_shards,
        counted(verified.n_samples, "sample"),
        verified.bytes as f64 / 1e6,
        thousands(verified.n_bad)
    );
    if args.json {
        let line = json!({ "shards": verified.n_shards, "bad_shards": verified.n_bad_shards,
            "samples": verified.n_samples, "image_bytes": verified.bytes, "bad": verified.n_bad });
        out!("{line}");
    }
    verified.check_images(&args.shards)?;
    Ok(if verified.is_good() { ExitCode::SUCCESS } else { ExitCode::from(DATA) })
}
