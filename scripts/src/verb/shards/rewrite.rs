//! `ocelli shards filter` and `resize`, and the flags and counts of all verbs that rewrite shards.

use std::path::PathBuf;
use std::process::ExitCode;

use pipeline::Storage;
use pipeline::words::{counted, thousands};
use prep::filter::{FilterRules, filter};
use prep::resize::{ResizeRules, resize};
use prep::rewrite::{RewriteJob, RewriteTotals};

use crate::progress::StageBar;

/// Flags of every verb that rewrites shards.
#[derive(clap::Args)]
pub(crate) struct RewriteFlags {
    /// Shards: paths, patterns such as 'train-*.tar', folders, or URLs.
    #[arg(required = true)]
    shards: Vec<String>,
    /// Output folder for the shards, which keep their names, and for lists.
    #[arg(long)]
    pub(crate) out: PathBuf,
    /// Delete the output of another such job in the folder and start over.
    #[arg(long)]
    overwrite: bool,
    /// Print a line of JSON at the end.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Flags of `shards filter`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli shards filter data/ --min-side 64 --max-aspect 4 --out kept/")]
pub(crate) struct FilterArgs {
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

/// Flags of `shards resize`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli shards resize data/ --short-side 256 --out small/")]
pub(crate) struct ResizeArgs {
    #[command(flatten)]
    flags: RewriteFlags,
    /// Short side in pixels. Images whose short side is smaller or equal are left unchanged, as are
    /// 16-bit, floating-point, multi-band and multi-page images. Use twice the size of the largest
    /// view. 0 keeps all sizes.
    #[arg(long, default_value_t = 512)]
    short_side: u32,
    /// JPEG quality, 1 to 100.
    #[arg(long, default_value_t = 95, value_parser = clap::value_parser!(u8).range(1..=100))]
    quality: u8,
    /// Convert progressive JPEGs to baseline, which decodes two to three times faster.
    #[arg(long)]
    baseline: bool,
    /// Rotate images according to their EXIF orientation; the written images have no EXIF.
    #[arg(long)]
    apply_exif: bool,
}

impl RewriteFlags {
    /// Returns the job that the flags describe.
    pub(crate) fn job(&self) -> RewriteJob<'_> {
        RewriteJob { shards: &self.shards, out: &self.out, overwrite: self.overwrite }
    }
}

pub(crate) fn run_filter(args: &FilterArgs, storage: &Storage) -> anyhow::Result<ExitCode> {
    let rules = FilterRules {
        min_side: args.min_side,
        max_aspect: args.max_aspect,
        min_deviation: args.min_deviation,
    };
    let totals = filter(&args.flags.job(), &rules, storage, &StageBar::new())?;
    print_totals(&totals, args.flags.json);
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn run_resize(args: &ResizeArgs, storage: &Storage) -> anyhow::Result<ExitCode> {
    let rules = ResizeRules {
        short_side: args.short_side,
        quality: args.quality,
        baseline: args.baseline,
        apply_exif: args.apply_exif,
    };
    let totals = resize(&args.flags.job(), &rules, storage, &StageBar::new())?;
    print_totals(&totals, args.flags.json);
    Ok(ExitCode::SUCCESS)
}

/// Prints the counts of a job.
pub(crate) fn print_totals(totals: &RewriteTotals, json: bool) {
    let existing = match totals.n_existing_shards {
        0 => String::new(),
        n => format!(", {n} already done"),
    };
    out!(
        "{} written{existing}: {} unchanged, {} changed, {} dropped; {:.1} MB of {:.1} MB",
        counted(totals.n_shards, "shard"),
        counted(totals.n_kept, "sample"),
        thousands(totals.n_replaced),
        thousands(totals.n_dropped),
        totals.bytes_out as f64 / 1e6,
        totals.bytes_in as f64 / 1e6
    );
    if let Some(list) = &totals.list {
        out!("reasons for dropped samples: {}", list.display());
    }
    if json {
        out!("{}", totals.to_json());
    }
}
