//! Samples that a run could not use, each with as much of its picture as can be decoded.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::Path;

use augment::{DecodeRules, Image};
use image::{ImageReader, Limits, RgbImage};
use pipeline::{Dataset, SampleId};
use serde::Serialize;

use super::tile::Tile;
use crate::run::quarantine::BadSample;

/// Largest number of samples that are shown; the others are only counted.
const MAX_SHOWN: usize = 60;

/// Limit of the bytes that a decoder may allocate for a damaged image.
const MAX_DECODED_BYTES: u64 = 256 << 20;

/// A sample, and the picture that a tolerant decoder makes of it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Shown {
    #[serde(flatten)]
    sample: BadSample,
    /// Picture of the sample; absent where no pixel could be decoded, or the shard is not
    /// available.
    tile: Option<Tile>,
}

/// Returns the first of `bad`, looked up in `dataset` if it is available. Paths of shards are
/// relative to `folder`.
pub(crate) fn shown_samples(bad: &[BadSample], dataset: Option<&Dataset>, folder: &Path) -> Vec<Shown> {
    let bad = &bad[..bad.len().min(MAX_SHOWN)];
    let mut wanted: BTreeMap<(String, String), Option<Tile>> =
        bad.iter().map(|sample| (shard_and_key(sample, folder), None)).collect();
    let mut n_missing = wanted.len();
    for id in (0..dataset.map_or(0, Dataset::n_samples)).map(SampleId) {
        if n_missing == 0 {
            break;
        }
        let Some(dataset) = dataset else { break };
        let (shard, key, _) = dataset.describe(id);
        if let Some(slot) = wanted.get_mut(&(shard, key)) {
            n_missing -= 1;
            *slot = dataset.read(id).ok().and_then(|sample| tile(&sample.image.files()));
        }
    }
    let mut shown = Vec::with_capacity(bad.len());
    for sample in bad {
        let tile = wanted.get(&shard_and_key(sample, folder)).cloned().flatten();
        shown.push(Shown { sample: sample.clone(), tile });
    }
    shown
}

fn shard_and_key(sample: &BadSample, folder: &Path) -> (String, String) {
    (folder.join(&sample.shard).display().to_string(), sample.key.clone())
}

/// Decodes an image that may be damaged; `None` if nothing could be decoded.
fn tile(files: &[&[u8]]) -> Option<Tile> {
    if let Some(tile) = files.first().and_then(|first| partial_tile(first)) {
        return Some(tile);
    }
    let image = Image::decode_any(files, &DecodeRules::default()).ok()?.picture();
    let image = RgbImage::from_raw(image.width_px, image.height_px, image.data)?;
    Tile::from_image(&image, String::new()).ok()
}

/// Decodes as much of a file as can be decoded.
fn partial_tile(bytes: &[u8]) -> Option<Tile> {
    let mut reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format().ok()?;
    let mut limits = Limits::default();
    limits.max_alloc = Some(MAX_DECODED_BYTES);
    reader.limits(limits);
    let image = reader.decode().ok()?.thumbnail(160, 160).to_rgb8();
    Tile::from_image(&image, String::new()).ok()
}
