//! `ocelli shards filter`: drops images that are corrupt, too small, too long or blank.

use std::process::ExitCode;

use pipeline::Storage;

use augment::decode::decode;
use augment::{DecodeRules, Rgb8};
use serde_json::json;

use crate::shards::rewrite::{Item, Job, RewriteFlags, Verdict, rewrite};

/// Flags of `shards filter`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli shards filter data/ --min-side 64 --max-aspect 4 --out kept/")]
pub(crate) struct Args {
    #[command(flatten)]
    flags: RewriteFlags,
    /// Drop images whose short side is below this, in pixels.
    #[arg(long, default_value_t = 0)]
    min_side: u32,
    /// Drop images whose ratio of long to short side is above this.
    #[arg(long, default_value_t = f64::INFINITY)]
    max_aspect: f64,
    /// Drop images whose gray levels, 0 to 255, have a standard deviation below this; 0 keeps blank images.
    #[arg(long, default_value_t = 0.0)]
    min_deviation: f64,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let sources = storage.sources(&args.flags.shards)?;
    let settings = json!({
        "min_side": args.min_side,
        "max_aspect": args.max_aspect.to_string(),
        "min_deviation": args.min_deviation,
    });
    let job = Job { out: &args.flags.out, verb: "filter", settings, overwrite: args.flags.overwrite };
    let totals = rewrite(&sources, storage, &job, |item| match flaw(args, item) {
        Some(reason) => Verdict::Drop(reason),
        None => Verdict::Keep,
    })?;
    totals.print(args.flags.json);
    Ok(ExitCode::SUCCESS)
}

/// Reason to drop a sample, if any.
fn flaw(args: &Args, item: &Item<'_>) -> Option<String> {
    let Some((_, bytes)) = item.image() else { return Some("no image".into()) };
    let image = match decode(bytes, &DecodeRules::default()) {
        Ok(image) => image,
        Err(error) => return Some(error.to_string()),
    };
    let (short, long) = (image.width_px.min(image.height_px), image.width_px.max(image.height_px));
    if short < args.min_side {
        return Some(format!("{} x {} px is too small", image.width_px, image.height_px));
    }
    if f64::from(long) > args.max_aspect * f64::from(short) {
        return Some(format!("{} x {} px is too long", image.width_px, image.height_px));
    }
    let deviation = gray_deviation(&image);
    (deviation < args.min_deviation).then(|| format!("blank: gray levels deviate by {deviation:.2}"))
}

fn gray_deviation(image: &Rgb8) -> f64 {
    let gray =
        image.data.chunks_exact(3).map(|p| f64::from(p.iter().map(|v| u32::from(*v)).sum::<u32>()) / 3.0);
    let (n, sum, squares) = gray.fold((0.0, 0.0, 0.0), |(n, s, q), v| (n + 1.0, s + v, q + v * v));
    let mean = sum / n;
    (squares / n - mean * mean).max(0.0).sqrt()
}
