//! `ocelli shards filter`: drops images that are corrupt, too small, too long or blank.

use std::process::ExitCode;

use pipeline::Storage;

use augment::{DecodeRules, Image};
use serde_json::json;

use crate::progress::StageBar;
use crate::shards::rewrite::{RewriteFlags, print_totals};
use prep::rewrite::{Item, Job, Verdict, rewrite};

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
    let sources = storage.sources(&args.flags.shards)?;
    let settings = json!({
        "min_side": args.min_side,
        "max_aspect": args.max_aspect.to_string(),
        "min_deviation": args.min_deviation,
    });
    let job = Job { out: &args.flags.out, verb: "filter", settings, overwrite: args.flags.overwrite };
    let totals = rewrite(&sources, storage, &job, &StageBar::new(), |item| match flaw(args, item) {
        Some(reason) => Verdict::Drop(reason),
        None => Verdict::Keep,
    })?;
    print_totals(&totals, args.flags.json);
    Ok(ExitCode::SUCCESS)
}

/// Returns the reason to drop a sample, if any.
fn flaw(args: &Args, item: &Item<'_>) -> Option<String> {
    let files = item.files();
    if files.is_empty() {
        return Some("no image".into());
    }
    let image = match Image::decode_any(&files, &DecodeRules::default()) {
        Ok(image) => image,
        Err(error) => return Some(error.to_string()),
    };
    let [width, height] = image.size_px();
    let short = width.min(height);
    let long = width.max(height);
    if short < args.min_side {
        return Some(format!("{width} x {height} px is too small"));
    }
    if f64::from(long) > args.max_aspect * f64::from(short) {
        return Some(format!("{width} x {height} px is too elongated"));
    }
    let deviation = gray_deviation(&image);
    (deviation < args.min_deviation)
        .then(|| format!("blank: standard deviation of gray levels is {deviation:.2}"))
}

/// Returns the standard deviation of the means over the channels, scaled so that the largest value
/// of 8 or 16 bits, or 1, is 255.
fn gray_deviation(image: &Image) -> f64 {
    let gray: Vec<f64> = match image {
        Image::Rgb(image) => image
            .data
            .chunks_exact(3)
            .map(|pixel| f64::from(pixel.iter().map(|value| u32::from(*value)).sum::<u32>()) / 3.0)
            .collect(),
        Image::Bands(image) => {
            let scale = 255.0 / f64::from(image.depth.unit()) / image.format().n_channels as f64;
            let mut gray = vec![0.0; image.n_pixels()];
            for channel in image.channels() {
                for (gray, value) in gray.iter_mut().zip(channel) {
                    *gray += f64::from(*value) * scale;
                }
            }
            gray
        }
    };
    let n = gray.len() as f64;
    let mut sum = 0.0;
    let mut squares = 0.0;
    for value in gray {
        sum += value;
        squares += value * value;
    }
    let mean = sum / n;
    (squares / n - mean * mean).max(0.0).sqrt()
}
