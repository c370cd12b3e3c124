//! Resizing of the images in shards: large images get a short side, and progressive JPEGs become
//! baseline. Masks get the sizes of their images.

use std::sync::atomic::{AtomicU64, Ordering};

use augment::crop::CropBox;
use augment::decode::decode;
use augment::facts::{ColorKind, facts};
use augment::{DecodeRules, Mask, Rgb8, bands};
use fast_image_resize::images::{Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};
use pipeline::words::counted;
use pipeline::{Progress, Storage};
use serde_json::json;

use crate::encode::{jpeg, png_of_one_channel};
use crate::error::PrepError;
use crate::rewrite::{Item, NewMember, Output, RewriteJob, RewriteTotals, Verdict, rewrite};

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
/// stay as they are. A mask is resized with its image, by nearest neighbor. An image with a mask
/// stays as it is if the mask does not fit it, or if `apply_exif` would turn it: masks may have
/// been drawn on either.
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
        // 2 since masks are resized with their images.
        "version": 2,
        "short_side": rules.short_side,
        "quality": rules.quality,
        "baseline": rules.baseline,
        "apply_exif": rules.apply_exif,
    });
    let output = Output { out: job.out, verb: "resize", settings, overwrite: job.overwrite };
    let n_kept_for_masks = AtomicU64::new(0);
    let totals = rewrite(&sources, storage, &output, progress, |item| match resized(rules, item) {
        Resized::Changed(members) => Verdict::Replace(members),
        Resized::Unchanged => Verdict::Keep,
        Resized::KeptForMask => {
            n_kept_for_masks.fetch_add(1, Ordering::Relaxed);
            Verdict::Keep
        }
    })?;
    let n_kept_for_masks = n_kept_for_masks.into_inner();
    if n_kept_for_masks > 0 {
        tracing::warn!(
            "{} with masks left as stored: a mask cannot be read or has another size than its image, or EXIF \
             data turns the image",
            counted(n_kept_for_masks, "image")
        );
    }
    Ok(totals)
}

/// Result of resizing a sample.
enum Resized {
    /// The sample has these new members.
    Changed(Vec<NewMember>),
    /// The sample stays as it is.
    Unchanged,
    /// The image would change, and stays as it is because of its mask.
    KeptForMask,
}

/// Resizes the image of a sample, and its mask. An image that cannot be decoded stays as it is:
/// dropping images is the job of the filter.
fn resized(rules: &ResizeRules, item: &Item<'_>) -> Resized {
    let Some((extension, bytes)) = item.image() else { return Resized::Unchanged };
    // Images that a JPEG cannot hold are kept as they are.
    if bands::exceeds_rgb8(bytes) {
        return Resized::Unchanged;
    }
    let Ok(facts) = facts(bytes) else { return Resized::Unchanged };
    let short = facts.width_px.min(facts.height_px);
    let shrinks = rules.short_side > 0 && short > rules.short_side;
    let turns = rules.apply_exif && facts.turned;
    let becomes_baseline = rules.baseline && facts.progressive;
    if !(shrinks || turns || becomes_baseline) {
        return Resized::Unchanged;
    }
    if turns && item.mask().is_some() {
        return Resized::KeptForMask;
    }
    let decoding = DecodeRules { apply_exif: rules.apply_exif, ..DecodeRules::default() };
    let Ok(image) = decode(bytes, &decoding) else { return Resized::Unchanged };
    let mut small = None;
    if shrinks {
        small = resize_short_side(&image, rules.short_side);
        if small.is_none() {
            return Resized::Unchanged;
        }
    }
    let mut members = Vec::new();
    if let (Some((extension, bytes)), Some(small)) = (item.mask(), &small) {
        let image_px = [image.width_px, image.height_px];
        let Some(bytes) = resized_mask(bytes, image_px, [small.width_px, small.height_px]) else {
            return Resized::KeptForMask;
        };
        members.push(NewMember { replaced: extension.clone(), extension: extension.clone(), bytes });
    }
    let is_gray = facts.color == ColorKind::Gray;
    match jpeg(small.as_ref().unwrap_or(&image), rules.quality, is_gray) {
        Ok(bytes) => {
            members.push(NewMember { replaced: extension.clone(), extension: "jpg".into(), bytes });
            Resized::Changed(members)
        }
        Err(_) => Resized::Unchanged,
    }
}

/// Resizes the mask in `bytes`, that of an image of `image_px`, to `size_px`; `None` if it cannot
/// be decoded or has another size than its image.
fn resized_mask(bytes: &[u8], image_px: [u32; 2], size_px: [u32; 2]) -> Option<Vec<u8>> {
    let mask = Mask::decode(bytes, DecodeRules::default().max_image_pixels()).ok()?;
    mask.check_size(image_px).ok()?;
    let classes = mask.resized(CropBox::from_size(image_px), size_px);
    png_of_one_channel(&classes, size_px).ok()
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
