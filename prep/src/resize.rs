//! Resizing of the images in shards: large images get a short side, and progressive JPEGs become
//! baseline.

use augment::decode::decode;
use augment::facts::{ColorKind, facts};
use augment::{DecodeRules, Rgb8, bands};
use fast_image_resize::images::{Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};
use pipeline::{Progress, Storage};
use serde_json::json;

use crate::encode::jpeg;
use crate::error::PrepError;
use crate::rewrite::{Item, Output, RewriteJob, RewriteTotals, Verdict, rewrite};

/// Rules by which images are written anew.
pub struct ResizeRules {
    /// Short side of images whose short side is longer, in pixels; 0 keeps all sizes.
    pub short_side: u32,
    /// JPEG quality, 1 to 100.
    pub quality: u8,
    /// `true` if progressive JPEGs become baseline.
    pub baseline: bool,
    /// `true` if images are turned as EXIF states.
    pub apply_exif: bool,
}

/// Writes the shards of `job` with the images that `rules` demand. Images that a JPEG cannot hold
/// stay as they are.
///
/// # Errors
/// [`PrepError`] when the folder belongs to another job, or when shards cannot be read or written.
pub fn resize(
    job: &RewriteJob<'_>,
    rules: &ResizeRules,
    storage: &Storage,
    progress: &dyn Progress,
) -> Result<RewriteTotals, PrepError> {
    let sources = storage.sources(job.shards)?;
    let settings = json!({
        "short_side": rules.short_side,
        "quality": rules.quality,
        "baseline": rules.baseline,
        "apply_exif": rules.apply_exif,
    });
    let output = Output { out: job.out, verb: "resize", settings, overwrite: job.overwrite };
    rewrite(&sources, storage, &output, progress, |item| match resized(rules, item) {
        Some(bytes) => Verdict::Replace("jpg", bytes),
        None => Verdict::Keep,
    })
}

/// Returns the image of a sample as a new JPEG; `None` if it stays as it is, or cannot be decoded:
/// dropping images is the job of the filter.
fn resized(rules: &ResizeRules, item: &Item<'_>) -> Option<Vec<u8>> {
    let (_, bytes) = item.image()?;
    // Images that a JPEG cannot hold are kept as they are.
    if bands::exceeds_rgb8(bytes) {
        return None;
    }
    let facts = facts(bytes).ok()?;
    let short = facts.width_px.min(facts.height_px);
    let shrinks = rules.short_side > 0 && short > rules.short_side;
    let changes = shrinks || (rules.baseline && facts.progressive) || (rules.apply_exif && facts.turned);
    if !changes {
        return None;
    }
    let decoding = DecodeRules { apply_exif: rules.apply_exif, ..DecodeRules::default() };
    let mut image = decode(bytes, &decoding).ok()?;
    if shrinks {
        image = resize_short_side(&image, rules.short_side)?;
    }
    jpeg(&image, rules.quality, facts.color == ColorKind::Gray).ok()
}

/// Resizes an image to a short side of `short_px` by an antialiased Lanczos filter with three
/// lobes; `None` if that is impossible.
fn resize_short_side(image: &Rgb8, short_px: u32) -> Option<Rgb8> {
    let short = f64::from(image.width_px.min(image.height_px));
    let [width, height] = [image.width_px, image.height_px]
        .map(|side| ((f64::from(side) * f64::from(short_px) / short).round() as u32).max(1));
    // Of the crate only the code for pixels of four bytes is built, a tenth of its size.
    let padded: Vec<u8> = image.data.chunks_exact(3).flat_map(|p| [p[0], p[1], p[2], u8::MAX]).collect();
    let source = ImageRef::new(image.width_px, image.height_px, &padded, PixelType::U8x4).ok()?;
    let mut target = Image::new(width, height, PixelType::U8x4);
    let filter = ResizeAlg::Convolution(FilterType::Lanczos3);
    let options = ResizeOptions::new().resize_alg(filter).use_alpha(false);
    Resizer::new().resize(&source, &mut target, &options).ok()?;
    let colors = target.buffer().chunks_exact(4).flat_map(|p| [p[0], p[1], p[2]]).collect();
    Some(Rgb8::new(width, height, colors))
}
