//! `ocelli shards resize`: shrinks large images to a short side, and converts progressive JPEGs to
//! baseline.

use std::process::ExitCode;

use pipeline::Storage;
use prep::resize::{ResizeRules, resize};

use crate::progress::StageBar;
use crate::shards::rewrite::{RewriteFlags, print_totals};

/// Flags of `shards resize`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli shards resize data/ --short-side 256 --out small/")]
pub(crate) struct Args {
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

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
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
