//! Bits that the values of 16-bit images use: many cameras and scanners fill 10, 12 or 14 of them,
//! and such images are nearly black to a network for which the largest number is white.

use augment::{DecodeRules, Depth, bands};
use eval::ImageSet;
use pipeline::{Dataset, SampleId};

use crate::console::say;

/// Number of images that are inspected.
pub(crate) const N_INSPECTED: u64 = 16;

/// Bits that the inspected images of 16 bits use.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct BitsUsed {
    /// Number of images of 16 bits.
    pub(crate) n_images: u64,
    /// The largest of their values.
    pub(crate) largest: u16,
}

impl BitsUsed {
    /// Inspects the files of an image.
    pub(crate) fn inspect(&mut self, files: &[&[u8]], rules: &DecodeRules) {
        if let Some(largest) = bands::largest_of_16_bits(files, rules) {
            self.n_images += 1;
            self.largest = self.largest.max(largest);
        }
    }

    /// Describes that values use a part of their bits, with the `remedy`; `None` if they use all,
    /// or if `rules` state how many they use or take numbers as they are.
    pub(crate) fn describe(&self, rules: &DecodeRules, remedy: &str) -> Option<String> {
        let Self { n_images, largest } = *self;
        let bits = u16::BITS - largest.leading_zeros();
        let is_stated = rules.bits_used.is_some() || rules.format.depth == Depth::Float;
        if n_images == 0 || largest == 0 || bits == u16::BITS || is_stated {
            return None;
        }
        let images = if n_images == 1 { "the image" } else { "all images" };
        Some(format!(
            "the values of {images} of 16 bits that were looked at ({n_images}) use {bits} of them: the largest is {largest} of \
             65535; {remedy}"
        ))
    }
}

/// Prints a note if some images of `dataset`, which are inspected, use a part of 16 bits. Shards on
/// a server are not fetched for it.
pub(crate) fn note_bits(dataset: &Dataset, rules: &DecodeRules) {
    if !dataset.is_local() {
        return;
    }
    let n = dataset.n_samples();
    let n_read = n.min(N_INSPECTED);
    let mut bits = BitsUsed::default();
    for number in 0..n_read {
        if let Ok(sample) = dataset.read(SampleId(number * n / n_read)) {
            bits.inspect(&sample.image.files(), rules);
        }
    }
    print_bits(&bits, rules, "--set data.bits_used=BITS scales them");
}

/// Prints a note if some images of `images`, which are inspected, use a part of 16 bits.
pub(crate) fn note_image_set_bits(images: &ImageSet) -> anyhow::Result<()> {
    let (n_images, largest) = images.largest_of_16_bits(N_INSPECTED as usize)?;
    let bits = BitsUsed { n_images, largest };
    let remedy = "--bits-used BITS scales them for weights of others, data.bits_used in the recipe of a run";
    print_bits(&bits, images.rules(), remedy);
    Ok(())
}

/// Prints a note if values use a part of their `bits`.
pub(crate) fn print_bits(bits: &BitsUsed, rules: &DecodeRules, remedy: &str) {
    if let Some(sentence) = bits.describe(rules, remedy) {
        say(format!("note: {sentence}"));
    }
}
