//! `ocelli shards resize`: shrinks large images to a short side, and converts progressive JPEGs to
//! baseline.

use std::process::ExitCode;

use pipeline::Storage;

use anyhow::Context;
use augment::decode::decode;
use augment::facts::{ColorKind, facts};
use augment::{DecodeRules, Rgb8, bands};
use fast_image_resize::images::{Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};
use serde_json::json;

use crate::progress::StageBar;
use crate::shards::rewrite::{RewriteFlags, print_totals};
use prep::encode::jpeg;
use prep::rewrite::{Item, Job, Verdict, rewrite};

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
    let sources = storage.sources(&args.flags.shards)?;
    let settings = json!({
        "short_side": args.short_side,
        "quality": args.quality,
        "baseline": args.baseline,
        "apply_exif": args.apply_exif,
    });
    let job = Job { out: &args.flags.out, verb: "resize", settings, overwrite: args.flags.overwrite };
    // An image that cannot be decoded is kept: dropping images is the job of `filter`.
    let totals = rewrite(&sources, storage, &job, &StageBar::new(), |item| {
        resize(args, item).unwrap_or(Verdict::Keep)
    })?;
    print_totals(&totals, args.flags.json);
    Ok(ExitCode::SUCCESS)
}

fn resize(args: &Args, item: &Item<'_>) -> anyhow::Result<Verdict> {
    let (_, bytes) = item.image().context("no image")?;
    // Images that a JPEG cannot hold are kept as they are.
    if bands::exceeds_rgb8(bytes) {
        return Ok(Verdict::Keep);
    }
    let facts = facts(bytes)?;
    let short = facts.width_px.min(facts.height_px);
    let shrinks = args.short_side > 0 && short > args.short_side;
    let changes = shrinks || (args.baseline && facts.progressive) || (args.apply_exif && facts.turned);
    if !changes {
        return Ok(Verdict::Keep);
    }
    let rules = DecodeRules { apply_exif: args.apply_exif, ..DecodeRules::default() };
    let mut image = decode(bytes, &rules)?;
    if shrinks {
        image = resize_short_side(&image, args.short_side)?;
    }
    Ok(Verdict::Replace("jpg", jpeg(&image, args.quality, facts.color == ColorKind::Gray)?))
}

/// Resizes an image to a short side of `short_px` by an antialiased Lanczos filter with three
/// lobes.
fn resize_short_side(image: &Rgb8, short_px: u32) -> anyhow::Result<Rgb8> {
    let short = f64::from(image.width_px.min(image.height_px));
    let [width, height] = [image.width_px, image.height_px]
        .map(|side| ((f64::from(side) * f64::from(short_px) / short).round() as u32).max(1));
    // Of the crate only the code for pixels of four bytes is built, a tenth of its size.
    let padded: Vec<u8> = image.data.chunks_exact(3).flat_map(|p| [p[0], p[1], p[2], u8::MAX]).collect();
    let source = ImageRef::new(image.width_px, image.height_px, &padded, PixelType::U8x4)?;
    let mut target = Image::new(width, height, PixelType::U8x4);
    let filter = ResizeAlg::Convolution(FilterType::Lanczos3);
    Resizer::new().resize(&source, &mut target, &ResizeOptions::new().resize_alg(filter).use_alpha(false))?;
    let colors = target.buffer().chunks_exact(4).flat_map(|p| [p[0], p[1], p[2]]).collect();
    Ok(Rgb8::new(width, height, colors))
}
