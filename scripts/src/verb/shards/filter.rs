//! `ocelli shards filter`: drops images that are corrupt, too small, too long or blank.

use std::process::ExitCode;

use pipeline::Storage;
use prep::filter::{FilterRules, filter};

use crate::progress::StageBar;
use crate::shards::rewrite::{RewriteFlags, print_totals};

/// Flags of `shards filter`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli shards filter data/ --min-side 64 --max-aspect 4 --out kept/")]
pub(crate) struct Args {
    #[command(flatten)]
    flags: RewriteFlags,
    /// Drop images whose short side is below this many pixels.
    #[arg(long, default_value_t = 0)]
    min_side: u32,
    /// Drop images whose aspect ratio (long side to short side) is above this.
    #[arg(long, default_value_t = f64::INFINITY)]
    max_aspect: f64,
    /// Drop images whose gray levels (0 to 255) have a standard deviation below this; 0 keeps blank
    /// images.
    #[arg(long, default_value_t = 0.0)]
    min_deviation: f64,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let rules = FilterRules {
        min_side: args.min_side,
        max_aspect: args.max_aspect,
        min_deviation: args.min_deviation,
    };
    let totals = filter(&args.flags.job(), &rules, storage, &StageBar::new())?;
    print_totals(&totals, args.flags.json);
    Ok(ExitCode::SUCCESS)
}
