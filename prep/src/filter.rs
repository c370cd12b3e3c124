//! Filtering of shards: images that are corrupt, too small, too long or blank are left out.

use augment::{DecodeRules, Image};
use pipeline::{Progress, Storage};
use serde_json::json;

use crate::error::PrepError;
use crate::rewrite::{Item, Output, RewriteJob, RewriteTotals, Verdict, rewrite};

/// Rules by which images are left out.
pub struct FilterRules {
    /// Minimum of the short side, in pixels.
    pub min_side: u32,
    /// Maximum of the aspect ratio: long side to short side.
    pub max_aspect: f64,
    /// Minimum of the standard deviation of the gray levels, 0 to 255.
    pub min_deviation: f64,
}

/// Writes the shards of `job` without the images that `rules` leave out.
///
/// # Errors
/// [`PrepError`] when the folder belongs to another job, or when shards cannot be read or written.
pub fn filter(
    job: &RewriteJob<'_>,
    rules: &FilterRules,
    storage: &Storage,
    progress: &dyn Progress,
) -> Result<RewriteTotals, PrepError> {
    let sources = storage.sources(job.shards)?;
    let settings = json!({
        "min_side": rules.min_side,
        "max_aspect": rules.max_aspect.to_string(),
        "min_deviation": rules.min_deviation,
    });
    let output = Output { out: job.out, verb: "filter", settings, overwrite: job.overwrite };
    rewrite(&sources, storage, &output, progress, |item| match flaw(rules, item) {
        Some(reason) => Verdict::Drop(reason),
        None => Verdict::Keep,
    })
}

/// Returns the reason to drop a sample, if any.
fn flaw(rules: &FilterRules, item: &Item<'_>) -> Option<String> {
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
    if short < rules.min_side {
        return Some(format!("{width} x {height} px is too small"));
    }
    if f64::from(long) > rules.max_aspect * f64::from(short) {
        return Some(format!("{width} x {height} px is too elongated"));
    }
    let deviation = gray_deviation(&image);
    (deviation < rules.min_deviation)
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
