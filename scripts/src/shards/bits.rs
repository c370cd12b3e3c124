//! Bits that the values of 16-bit images use: many cameras and scanners fill 10, 12 or 14 of them,
//! and such images are nearly black to a network that takes the largest number for white.

use augment::{DecodeRules, Depth, bands};
use eval::ImageSet;
use pipeline::{Dataset, SampleId};

use crate::console::say;

/// Images that are looked at.
pub(crate) const N_LOOKED_AT: u64 = 16;

/// Images of 16 bits that were looked at.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct BitsSeen {
    /// Number of images of 16 bits.
    pub(crate) n_images: u64,
    /// The largest of their values.
    pub(crate) largest: u16,
}

impl BitsSeen {
    /// Looks at the files of an image.
    pub(crate) fn look_at(&mut self, files: &[&[u8]], rules: &DecodeRules) {
        if let Some(largest) = bands::largest_of_16_bits(files, rules) {
            self.n_images += 1;
            self.largest = self.largest.max(largest);
        }
    }

    /// Says that values use a part of their bits, and what is to be done; `None` where they use
    /// all, and where `rules` say how many they use or take numbers as they are.
    pub(crate) fn in_words(&self, rules: &DecodeRules, remedy: &str) -> Option<String> {
        let Self { n_images, largest } = *self;
        let bits = u16::BITS - largest.leading_zeros();
        let is_told = rules.bits_used.is_some() || rules.format.depth == Depth::Float;
        if n_images == 0 || largest == 0 || bits == u16::BITS || is_told {
            return None;
        }
        let images = if n_images == 1 { "the image" } else { "all images" };
        Some(format!(
            "the values of {images} of 16 bits that were looked at ({n_images}) use {bits} of them: the largest is {largest} of \
             65535; {remedy}"
        ))
    }
}

/// Prints a note if some images of `dataset`, which are looked at, use a part of 16 bits. Shards on
/// a server are not fetched for it.
pub(crate) fn note_bits(dataset: &Dataset, rules: &DecodeRules) {
    if !dataset.is_local() {
        return;
    }
    let n = dataset.n_samples();
    let n_read = n.min(N_LOOKED_AT);
    let mut seen = BitsSeen::default();
    for number in 0..n_read {
        if let Ok(sample) = dataset.read(SampleId(number * n / n_read)) {
            seen.look_at(&sample.image.files(), rules);
        }
    }
    say_of(&seen, rules, "--set data.bits_used=BITS scales them");
}

/// Prints a note if some images of `images`, which are looked at, use a part of 16 bits.
pub(crate) fn note_bits_of(images: &ImageSet) -> anyhow::Result<()> {
    let (n_images, largest) = images.largest_of_16_bits(N_LOOKED_AT as usize)?;
    let seen = BitsSeen { n_images, largest };
    let remedy = "--bits-used BITS scales them for weights of others, data.bits_used in the recipe of a run";
    say_of(&seen, images.rules(), remedy);
    Ok(())
}

/// Prints a note of `seen`, if there is something to say.
pub(crate) fn say_of(seen: &BitsSeen, rules: &DecodeRules, remedy: &str) {
    if let Some(sentence) = seen.in_words(rules, remedy) {
        say(format!("note: {sentence}"));
    }
}
