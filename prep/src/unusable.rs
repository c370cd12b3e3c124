//! What the images of a set have in common if none of them can be used.

use augment::{AugmentError, DecodeRules, Fill, Image, PixelFormat, bands};
use pipeline::Dataset;
use pipeline::magic::{FileFormat, FileKind, START_BYTES, recognize};

use crate::channel_sums::ChannelSums;

/// Number of images that are inspected.
const N_INSPECTED: u64 = 16;

/// Reason why an image cannot be used.
#[derive(Debug, Clone, PartialEq)]
pub struct Flaw {
    /// Format that its header states, if it is not the expected one.
    format: Option<PixelFormat>,
    /// Description of its bytes, if they are not an image of a format that is read.
    content: Option<&'static str>,
    /// Error of reading or decoding it.
    reason: String,
}

/// Images of a set, none of which can be used.
#[derive(Debug, Clone, PartialEq)]
pub struct Unusable {
    /// Number of images that were inspected.
    pub n_images: usize,
    /// Format of the pixels of all of them, if it is not the expected one.
    pub format: Option<PixelFormat>,
    /// Reason that all have in common, or the one of the first.
    pub reason: String,
}

/// Mean and standard deviation of each channel of a few images.
#[derive(Debug, Clone, PartialEq)]
pub struct Constants {
    /// Number of images that were measured.
    pub n_images: usize,
    /// Means, where 1 is the largest value of 8 or 16 bits.
    pub mean: Vec<f32>,
    /// Standard deviations in the same unit.
    pub std: Vec<f32>,
}

/// Inspects a few images of `dataset`, spread evenly. Returns what they have in common if none can
/// be decoded by `rules`; `None` if one can, or if shards would have to be fetched for it.
pub fn find_unusable(dataset: &Dataset, rules: &DecodeRules) -> Option<Unusable> {
    if !dataset.is_local() {
        return None;
    }
    let mut flaws = Vec::new();
    for id in dataset.spread(N_INSPECTED) {
        let flaw = match dataset.read(id) {
            Ok(sample) => Flaw::find(&sample.image.files(), rules)?,
            Err(error) if error.is_sample_error() => {
                Flaw { format: None, content: None, reason: error.to_string() }
            }
            // A shard that cannot be read is reported where it is used.
            Err(_) => return None,
        };
        flaws.push(flaw);
    }
    Unusable::from_flaws(&flaws)
}

/// Measures the constants of a few images of `dataset`, spread evenly; `None` if one of them cannot
/// be decoded by `rules`, if a channel has no data or one value only, or if shards would have to be
/// fetched for it.
pub fn measure_constants(dataset: &Dataset, rules: &DecodeRules) -> Option<Constants> {
    if !dataset.is_local() {
        return None;
    }
    let mut rules = *rules;
    if let Some(no_data) = &mut rules.no_data {
        no_data.fill = Fill::Missing;
    }
    let mut sums = ChannelSums::default();
    let mut n_images = 0;
    for id in dataset.spread(N_INSPECTED) {
        let sample = dataset.read(id).ok()?;
        let image = Image::decode(&sample.image.files(), &rules).ok()?;
        let image_sums = ChannelSums::from_image(&image);
        if !image_sums.has_data() {
            return None;
        }
        sums.add(&image_sums);
        n_images += 1;
    }
    let (mean, deviation) = sums.constants();
    if deviation.iter().any(|deviation| *deviation < 1e-6) {
        return None;
    }
    let mean = mean.into_iter().map(|value| value as f32).collect();
    let std = deviation.into_iter().map(|value| value as f32).collect();
    Some(Constants { n_images, mean, std })
}

/// Returns the format that the headers of an image's files state; `None` if they cannot be read.
pub(crate) fn header_format(files: &[&[u8]], rules: &DecodeRules) -> Option<PixelFormat> {
    let bands::SampleHeader { n_channels, depth, .. } = bands::sample_header(files, rules).ok()?;
    Some(PixelFormat { n_channels, depth })
}

impl Flaw {
    /// Returns the flaw of the image in `files`; `None` if it can be decoded by `rules`.
    pub fn find(files: &[&[u8]], rules: &DecodeRules) -> Option<Self> {
        let error = Image::decode(files, rules).err()?;
        let mut format = None;
        if let AugmentError::Format { .. } = error {
            format = header_format(files, rules).filter(|format| *format != rules.format);
        }
        let start = files.first().map(|file| &file[..file.len().min(START_BYTES)]);
        let content = start.and_then(recognize).and_then(describe_content);
        Some(Self { format, content, reason: error.to_string() })
    }
}

/// Describes the bytes of a file in `format`, with a remedy; `None` for an image of a format that
/// is read.
fn describe_content(format: FileFormat) -> Option<&'static str> {
    match (format.kind, format.name) {
        (FileKind::Image, "a HEIC image") => Some("is a HEIC image, which is not read: convert it to JPEG"),
        (FileKind::Image, "an AVIF image") => Some("is an AVIF image, which is not read: convert it to JPEG"),
        (FileKind::Image, "a JPEG 2000 image") => {
            Some("is a JPEG 2000 image, which is not read: convert it to JPEG or PNG")
        }
        (FileKind::Image | FileKind::Array, _) => None,
        (FileKind::Page, _) => {
            Some("is a web page, not an image: check where the files were downloaded from")
        }
        (FileKind::Pointer, _) => {
            Some("is a pointer of Git LFS, not the image: fetch the images with `git lfs pull`")
        }
        (FileKind::Text, _) => Some("is text, not an image"),
        (FileKind::Gzip | FileKind::Compressed(_) | FileKind::Archive, _) => {
            Some("is compressed or an archive, not an image: unpack it first")
        }
        (FileKind::Parquet | FileKind::Weights | FileKind::Other, _) => Some("is not an image"),
    }
}

impl Unusable {
    /// Finds what images with `flaws` have in common; `None` if there are no flaws.
    pub fn from_flaws(flaws: &[Flaw]) -> Option<Self> {
        let first = flaws.first()?;
        let n_images = flaws.len();
        let format = first.format.filter(|format| flaws.iter().all(|flaw| flaw.format == Some(*format)));
        let content = first.content.filter(|content| flaws.iter().all(|flaw| flaw.content == Some(*content)));
        let reason = if let Some(format) = format {
            format!("each has {format}")
        } else if let Some(content) = content {
            format!("each {content}")
        } else if flaws.iter().all(|flaw| flaw.reason == first.reason) {
            format!("for each: {}", first.reason)
        } else {
            format!("for the first: {}", first.reason)
        };
        Some(Self { n_images, format, reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flaws(files: &[&[u8]]) -> Vec<Flaw> {
        files.iter().map(|file| Flaw::find(&[*file], &DecodeRules::default()).unwrap()).collect()
    }

    /// Returns what the files have in common.
    fn common(files: &[&[u8]]) -> Unusable {
        Unusable::from_flaws(&flaws(files)).unwrap()
    }

    /// Returns an array of NumPy of five channels of 16 bits.
    fn array(value: u8) -> Vec<u8> {
        let header = "{'descr': '<u2', 'fortran_order': False, 'shape': (5, 8, 8), }";
        let header = format!("{header:<117}\n");
        let len_bytes = (header.len() as u16).to_le_bytes();
        let mut file = b"\x93NUMPY\x01\x00".to_vec();
        file.extend(len_bytes);
        file.extend(header.as_bytes());
        file.extend([value; 640]);
        file
    }

    #[test]
    fn what_images_have_in_common_is_found() {
        let tiles = [array(1), array(2)];
        let found = common(&[&tiles[0], &tiles[1]]);
        let format = found.format.unwrap();
        assert_eq!((found.n_images, format.to_string().as_str()), (2, "5 channels of 16 bits"));
        let page = b"<!DOCTYPE html><title>Login</title>";
        assert!(common(&[page, page]).reason.starts_with("each is a web page"));
        let mixed = common(&[page, &tiles[0]]);
        assert!(mixed.format.is_none() && mixed.reason.starts_with("for the first: "), "{mixed:?}");
        let damaged = common(&[b"\xff\xd8\xff\xe0 cut off", b"\xff\xd8\xff\xe0 cut off"]);
        assert!(damaged.reason.starts_with("for each: "), "{damaged:?}");
        assert_eq!(Unusable::from_flaws(&[]), None);
    }
}
