//! Fingerprints of samples: a hash of the bytes, and a perceptual hash of the image.
//!
//! The perceptual hash is the difference hash: the image at 9 x 8 gray pixels, one bit for each
//! pair of neighbors in a row. Two images are near when their hashes differ in few bits.

use std::ops::Range;

use augment::crop::CropBox;
use augment::resize::BoxResizer;
use augment::{DecodeRules, Image, Interpolation, Planes, Rgb8};
use pipeline::{PipelineError, Progress, Shard};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use crate::error::PrepError;

/// Fingerprint by which a sample is compared.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Fingerprint {
    #[serde(with = "hex_digits")]
    pub(crate) content: u128,
    /// Numbers of pixels and of bytes: the largest of several copies is kept.
    pub(crate) quality: (u64, u64),
    /// Difference hash; `None` for images too uniform to be distinguished.
    pub(crate) difference: Option<u64>,
}

/// A sample with its shard, its position there, and its fingerprint.
#[derive(Serialize, Deserialize)]
pub(crate) struct SampleEntry {
    pub(crate) shard: usize,
    #[serde(rename = "number")]
    pub(crate) index: usize,
    #[serde(rename = "print")]
    pub(crate) fingerprint: Fingerprint,
}

/// Numbers of 128 bits in JSON, as hexadecimal digits.
mod hex_digits {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(number: &u128, out: S) -> Result<S::Ok, S::Error> {
        format!("{number:032x}").serialize(out)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<u128, D::Error> {
        u128::from_str_radix(&String::deserialize(input)?, 16).map_err(D::Error::custom)
    }
}

/// Computes the fingerprints of the samples in the shards `range` of `shards`.
pub(crate) fn fingerprints(
    shards: &[Shard],
    range: Range<usize>,
    progress: &dyn Progress,
) -> Result<Vec<SampleEntry>, PrepError> {
    progress.begin("dedup", shards[range.clone()].iter().map(|shard| shard.len() as u64).sum());
    let mut entries = Vec::new();
    for shard_index in range {
        let shard = &shards[shard_index];
        let in_shard: Result<Vec<Option<SampleEntry>>, PipelineError> = (0..shard.len())
            .into_par_iter()
            .map(|index: usize| -> Result<Option<SampleEntry>, PipelineError> {
                progress.advance(1);
                let fingerprint = fingerprint(shard, index)?;
                Ok(fingerprint.map(|fingerprint| SampleEntry { shard: shard_index, index, fingerprint }))
            })
            .collect();
        entries.extend(in_shard?.into_iter().flatten());
    }
    Ok(entries)
}

/// Computes the fingerprint of sample `index` of `shard`; `None` if it has no image that can be
/// read.
fn fingerprint(shard: &Shard, index: usize) -> Result<Option<Fingerprint>, PipelineError> {
    if shard.image_bytes(index).is_none() {
        return Ok(None);
    }
    let encoded = match shard.image(index) {
        Err(error) if error.is_sample_error() => return Ok(None),
        encoded => encoded?,
    };
    let mut n_pixels = 0;
    let mut difference = None;
    if let Ok(image) = Image::decode_any(&encoded.files(), &DecodeRules::default()) {
        let image = image.picture();
        n_pixels = u64::from(image.width_px) * u64::from(image.height_px);
        difference = difference_hash(&image);
    }
    let quality = (n_pixels, encoded.len() as u64);
    Ok(Some(Fingerprint { content: xxh3_128(encoded.bytes()), quality, difference }))
}

/// Returns the difference hash; `None` if nearly all neighbors are equal, as in a blank image,
/// because such images would all be copies of one another.
fn difference_hash(image: &Rgb8) -> Option<u64> {
    const MIN_ONES: u32 = 6;
    let crop = CropBox::from_size([image.width_px, image.height_px]);
    let mut small = Planes::default();
    BoxResizer::default().resize(image, crop, [9, 8], Interpolation::Bilinear, &mut small).ok()?;
    let [r, g, b] = small.channels();
    let gray: Vec<u16> =
        r.iter().zip(g).zip(b).map(|((r, g), b)| u16::from(*r) + u16::from(*g) + u16::from(*b)).collect();
    let mut hash = 0u64;
    for row in gray.chunks_exact(9) {
        for pair in row.windows(2) {
            hash = hash << 1 | u64::from(pair[0] > pair[1]);
        }
    }
    (MIN_ONES..=64 - MIN_ONES).contains(&hash.count_ones()).then_some(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blank_images_have_no_difference_hash() {
        assert_eq!(difference_hash(&Rgb8::new(40, 30, vec![90; 3600])), None);
        let data = (0..40 * 30).flat_map(|i| [(i * 37 % 251) as u8; 3]).collect();
        assert!(difference_hash(&Rgb8::new(40, 30, data)).is_some());
    }
}
