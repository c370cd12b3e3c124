//! Bits that the values of 16-bit images use: many cameras and scanners fill 10, 12 or 14 of them,
//! and such images are nearly black to a network for which the largest number is white.

use augment::{DecodeRules, Depth, bands};
use pipeline::Dataset;

/// Number of images that are inspected.
pub const N_INSPECTED: u64 = 16;

/// Bits that the inspected images of 16 bits use.
#[derive(Debug, Clone, Copy, Default)]
pub struct BitsUsed {
    /// Number of images of 16 bits.
    pub n_images: u64,
    /// The largest of their values.
    pub largest: u16,
}

impl BitsUsed {
    /// Inspects the files of an image.
    pub fn inspect(&mut self, files: &[&[u8]], rules: &DecodeRules) {
        if let Some(largest) = bands::largest_of_16_bits(files, rules) {
            self.n_images += 1;
            self.largest = self.largest.max(largest);
        }
    }

    /// Describes that values use a part of their bits, with the `remedy`; `None` if they use all,
    /// or if `rules` state how many they use or take numbers as they are.
    pub fn describe(&self, rules: &DecodeRules, remedy: &str) -> Option<String> {
        let Self { n_images, largest } = *self;
        let bits = u16::BITS - largest.leading_zeros();
        let is_stated = rules.bits_used.is_some() || rules.format.depth == Depth::Float;
        if n_images == 0 || largest == 0 || bits == u16::BITS || is_stated {
            return None;
        }
        let images = match n_images {
            1 => "the inspected 16-bit image uses".to_string(),
            n => format!("{n} inspected 16-bit images use"),
        };
        let remedy = remedy.replace("BITS", &bits.to_string());
        Some(format!("{images} only {bits} of 16 bits: the largest value is {largest} of 65535; {remedy}"))
    }

    /// Reports that values use a part of their bits, as [`BitsUsed::describe`] does.
    pub fn report(&self, rules: &DecodeRules, remedy: &str) {
        if let Some(sentence) = self.describe(rules, remedy) {
            tracing::info!("{sentence}");
        }
    }
}

/// Reports if some images of `dataset`, which are inspected, use a part of 16 bits. Shards on a
/// server are not fetched for it.
pub fn report_bits(dataset: &Dataset, rules: &DecodeRules) {
    if !dataset.is_local() {
        return;
    }
    let mut bits = BitsUsed::default();
    for id in dataset.spread(N_INSPECTED) {
        if let Ok(sample) = dataset.read(id) {
            bits.inspect(&sample.image.files(), rules);
        }
    }
    let remedy = "scale them with --set data.bits_used=BITS and the constants of `ocelli shards stats \
        --bits-used BITS`";
    bits.report(rules, remedy);
}
