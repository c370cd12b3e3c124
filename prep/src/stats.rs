//! Statistics of a data set: its formats, sizes and classes, exact duplicates, the constants of its
//! channels, and how fast it will load.
//!
//! Those of parts of a job are put together in the order of the shards, so that sums have the bits
//! of one job.

use std::collections::{BTreeMap, HashSet};
use std::time::Instant;

use augment::facts::{ColorKind, Facts, facts};
use augment::{BlurRule, DecodeRules, Fill, Image, MultiCrop, PixelFormat, SampleKey, ViewMaker, bands};
use pipeline::shard::image::EncodedImage;
use pipeline::{PipelineError, Progress, Shard, Storage};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use crate::channel_sums::ChannelSums;
use crate::error::PrepError;
use crate::open::split_folders;
use crate::parts::{PartResults, ReadJob, Share, identities, open_folders, result_folder};
use crate::unusable::header_format;

/// Number of images whose views are timed for the prediction.
const N_TIMED: usize = 64;

/// Statistics of one sample.
struct SampleStats {
    facts: Option<Facts>,
    bytes: u64,
    hash: u128,
    /// Sums over the pixels; `None` for an image that cannot be decoded in the format.
    sums: Option<ChannelSums>,
    /// Format that the headers state, of an image that cannot be decoded in the expected one.
    other: Option<PixelFormat>,
    /// Largest value of an image of 16 bits.
    largest: Option<u16>,
    /// Value that the image states for pixels without data.
    no_data: Option<String>,
    decode_s: f64,
    classes: Vec<String>,
    /// Whether the folder of the image is its class.
    is_class_folder: bool,
}

/// Statistics of the samples of some shards, which are added to those of other shards.
#[derive(Default, Serialize, Deserialize)]
pub struct Stats {
    /// Number of samples.
    pub n_samples: u64,
    /// Number of samples without an image.
    pub n_no_image: u64,
    /// Number of images that cannot be decoded in the expected format.
    pub n_bad: u64,
    /// Hash of each image, in hexadecimal digits.
    hashes: Vec<String>,
    /// Numbers of images, by class.
    pub classes: BTreeMap<String, u64>,
    /// Number of images without a class.
    pub n_unlabeled: u64,
    /// Number of images whose class is their folder within an archive.
    pub n_by_folder: u64,
    /// Numbers of images, by format of the file.
    pub formats: BTreeMap<String, u64>,
    /// Number of progressive JPEGs.
    pub n_progressive: u64,
    /// Number of images that EXIF turns.
    pub n_turned: u64,
    /// Numbers of images, by kind of color.
    pub colors: BTreeMap<String, u64>,
    /// Width of each image, in pixels.
    pub widths: Vec<f64>,
    /// Height of each image, in pixels.
    pub heights: Vec<f64>,
    /// Ratio of width to height of each image.
    pub aspects: Vec<f64>,
    /// Length of each encoded image, in kilobytes.
    pub sizes_kb: Vec<f64>,
    /// Length of each shard, in megabytes.
    pub shard_mb: Vec<f64>,
    /// Sums of each shard: floating-point sums depend on their order, which is that of one job for
    /// any parts.
    sums: Vec<ChannelSums>,
    /// Numbers of images of other pixel formats, by format.
    pub others: BTreeMap<String, u64>,
    /// Number of images of 16 bits.
    pub n_wide: u64,
    /// The largest of their values.
    pub largest: u16,
    /// Numbers of images that state a value for pixels without data, by value.
    pub no_data: BTreeMap<String, u64>,
    /// Time for decoding all images, in seconds.
    pub decode_s: f64,
    /// Prediction of how many images a second are loaded.
    #[serde(skip)]
    pub predicted_images_per_s: f64,
}

/// Computes the statistics of `job`. A part saves the statistics of its shards.
///
/// # Errors
/// [`PrepError`] when shards cannot be read, or when the results of parts are missing or of another
/// job.
pub fn stats(
    job: &ReadJob<'_>,
    storage: &Storage,
    progress: &dyn Progress,
) -> Result<Share<Stats>, PrepError> {
    let given = split_folders(job.specs)?;
    let sources = given.sources(storage)?;
    let identity = json!({
        "shards": identities(&sources, job.work),
        "channels": job.rules.format.n_channels,
        "bits": job.rules.format.depth.bits(),
        "bits_used": job.rules.bits_used,
        "no_data": job.rules.no_data.and_then(|no_data| no_data.value),
    });
    let results = PartResults::new(result_folder(job.out, job.work)?, "stats", identity);
    let folders = open_folders(&given, job.work)?;
    // Pixels without data are left out of the sums.
    let mut rules = *job.rules;
    if let Some(no_data) = &mut rules.no_data {
        no_data.fill = Fill::Missing;
    }
    let share = results.compute(job.work, sources.len(), |range| {
        let shards = storage.open_all(&sources[range])?;
        collect_stats(&shards.iter().chain(&folders).collect::<Vec<_>>(), &rules, progress)
    })?;
    share.try_map(|parts| {
        let mut stats = Stats::default();
        for part in parts {
            stats.append(part);
        }
        let shards = storage.open_all(&sources)?;
        let shards: Vec<&Shard> = shards.iter().chain(&folders).collect();
        stats.predicted_images_per_s = predict_images_per_s(&shards, job.rules);
        Ok(stats)
    })
}

/// Computes the statistics of `shards`.
fn collect_stats(
    shards: &[&Shard],
    rules: &DecodeRules,
    progress: &dyn Progress,
) -> Result<Stats, PrepError> {
    progress.begin("stats", shards.iter().map(|shard| shard.len() as u64).sum());
    let mut stats = Stats::default();
    for shard in shards {
        let samples: Result<Vec<Option<SampleStats>>, PipelineError> = (0..shard.len())
            .into_par_iter()
            .map(|i: usize| {
                progress.advance(1);
                sample_stats(shard, i, rules)
            })
            .collect();
        stats.shard_mb.push(shard.index().shard_bytes as f64 / 1e6);
        stats.sums.push(ChannelSums::default());
        for sample in samples? {
            stats.add(sample);
        }
    }
    Ok(stats)
}

/// Computes the statistics of sample `i` of `shard`; `None` if it has no image.
fn sample_stats(shard: &Shard, i: usize, rules: &DecodeRules) -> Result<Option<SampleStats>, PipelineError> {
    if shard.image_bytes(i).is_none() {
        return Ok(None);
    }
    let (classes, is_class_folder, encoded) = match read_sample(shard, i) {
        // An empty image is counted as one that cannot be decoded.
        Err(error) if error.is_sample_error() => Default::default(),
        read => read?,
    };
    let files = encoded.files();
    let start = Instant::now();
    let image = Image::decode(&files, rules).ok();
    let decode_s = start.elapsed().as_secs_f64();
    let mut other = None;
    if image.is_none() {
        other = header_format(&files, rules).filter(|format| *format != rules.format);
    }
    Ok(Some(SampleStats {
        facts: files.first().and_then(|file| facts(file).ok()),
        bytes: encoded.len() as u64,
        hash: xxh3_128(encoded.bytes()),
        other,
        // Training refuses an image with a channel without data.
        sums: image.as_ref().map(ChannelSums::from_image).filter(ChannelSums::has_data),
        largest: bands::largest_of_16_bits(&files, rules),
        no_data: files.first().and_then(|file| bands::map_data(file).ok()??.no_data),
        decode_s,
        classes,
        is_class_folder,
    }))
}

/// Returns the classes of sample `i`, whether its folder is its class, and its image.
fn read_sample(shard: &Shard, i: usize) -> Result<(Vec<String>, bool, EncodedImage), PipelineError> {
    let classes = shard.classes(i)?;
    let is_class_folder = shard.has_class_of_folder(i)?;
    Ok((classes, is_class_folder, shard.image(i)?))
}

impl Stats {
    /// Adds a sample of the last shard; `None` is one without an image.
    fn add(&mut self, sample: Option<SampleStats>) {
        self.n_samples += 1;
        let Some(sample) = sample else {
            self.n_no_image += 1;
            return;
        };
        self.n_unlabeled += u64::from(sample.classes.is_empty());
        self.n_by_folder += u64::from(sample.is_class_folder);
        for class in sample.classes {
            *self.classes.entry(class).or_default() += 1;
        }
        if let Some(value) = sample.no_data {
            *self.no_data.entry(value).or_default() += 1;
        }
        self.hashes.push(format!("{:032x}", sample.hash));
        let (Some(facts), Some(sums)) = (sample.facts, sample.sums) else {
            self.n_bad += 1;
            if let Some(format) = sample.other {
                *self.others.entry(format.to_string()).or_default() += 1;
            }
            return;
        };
        if let Some(largest) = sample.largest {
            self.n_wide += 1;
            self.largest = self.largest.max(largest);
        }
        *self.formats.entry(facts.format.to_string()).or_default() += 1;
        *self.colors.entry(color_name(facts.color).to_string()).or_default() += 1;
        self.n_progressive += u64::from(facts.progressive);
        self.n_turned += u64::from(facts.turned);
        self.widths.push(f64::from(facts.width_px));
        self.heights.push(f64::from(facts.height_px));
        self.aspects.push(f64::from(facts.width_px) / f64::from(facts.height_px));
        self.sizes_kb.push(sample.bytes as f64 / 1e3);
        if let Some(last) = self.sums.last_mut() {
            last.add(&sums);
        }
        self.decode_s += sample.decode_s;
    }

    /// Adds the statistics of the shards that follow.
    fn append(&mut self, mut other: Self) {
        self.n_samples += other.n_samples;
        self.n_no_image += other.n_no_image;
        self.n_bad += other.n_bad;
        self.n_unlabeled += other.n_unlabeled;
        self.n_by_folder += other.n_by_folder;
        self.n_progressive += other.n_progressive;
        self.n_turned += other.n_turned;
        self.decode_s += other.decode_s;
        self.n_wide += other.n_wide;
        self.largest = self.largest.max(other.largest);
        add_counts(&mut self.no_data, other.no_data);
        add_counts(&mut self.classes, other.classes);
        add_counts(&mut self.formats, other.formats);
        add_counts(&mut self.colors, other.colors);
        add_counts(&mut self.others, other.others);
        self.hashes.append(&mut other.hashes);
        self.widths.append(&mut other.widths);
        self.heights.append(&mut other.heights);
        self.aspects.append(&mut other.aspects);
        self.sizes_kb.append(&mut other.sizes_kb);
        self.shard_mb.append(&mut other.shard_mb);
        self.sums.append(&mut other.sums);
    }

    /// Returns the number of images that are copies of others, bit for bit.
    pub fn n_duplicates(&self) -> u64 {
        let distinct: HashSet<&String> = self.hashes.iter().collect();
        (self.hashes.len() - distinct.len()) as u64
    }

    /// Returns the mean and the standard deviation of each channel.
    pub fn constants(&self) -> (Vec<f64>, Vec<f64>) {
        let mut all = ChannelSums::default();
        // A shard without a readable image has no channels.
        for sums in self.sums.iter().filter(|sums| **sums != ChannelSums::default()) {
            all.add(sums);
        }
        all.constants()
    }

    /// Returns the statistics as JSON.
    pub fn to_json(&self) -> Value {
        let (mean, deviation) = self.constants();
        json!({
            "samples": self.n_samples,
            "no_image": self.n_no_image,
            "bad": self.n_bad,
            "duplicates": self.n_duplicates(),
            "classes": self.classes.len(),
            "unlabeled": self.n_unlabeled,
            "classes_by_folder": self.n_by_folder,
            "formats": self.formats,
            "colors": self.colors,
            "other_pixels": self.others,
            "progressive": self.n_progressive,
            "exif_turned": self.n_turned,
            "images_of_16_bits": self.n_wide,
            "largest_of_16_bits": (self.n_wide > 0).then_some(self.largest),
            "no_data": self.no_data,
            "width_px": quantiles_json(&self.widths),
            "height_px": quantiles_json(&self.heights),
            "aspect": quantiles_json(&self.aspects),
            "kb": quantiles_json(&self.sizes_kb),
            "shard_mb": quantiles_json(&self.shard_mb),
            "mean": mean,
            "std": deviation,
            "predicted_images_per_s": self.predicted_images_per_s,
        })
    }
}

/// Adds `others` to `counts`, by name.
fn add_counts(counts: &mut BTreeMap<String, u64>, others: BTreeMap<String, u64>) {
    for (name, n) in others {
        *counts.entry(name).or_default() += n;
    }
}

fn color_name(color: ColorKind) -> &'static str {
    match color {
        ColorKind::Rgb => "rgb",
        ColorKind::Gray => "gray",
        ColorKind::Rgba => "alpha",
        ColorKind::Cmyk => "cmyk",
        ColorKind::Bands => "bands",
    }
}

/// Returns the smallest, the median and the largest value; zeros if there are none.
pub fn quantiles(values: &[f64]) -> [f64; 3] {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().saturating_sub(1);
    let middle = (0.5 * last as f64) as usize;
    [0, middle, last].map(|i| sorted.get(i).copied().unwrap_or(0.0))
}

fn quantiles_json(values: &[f64]) -> Value {
    let [low, p50, high] = quantiles(values);
    json!({ "min": low, "p50": p50, "max": high })
}

/// Predicts images per second: DINOv2's multi-crop on some images spread over the set, on one
/// thread, times the cores.
fn predict_images_per_s(shards: &[&Shard], rules: &DecodeRules) -> f64 {
    let mut multicrop = MultiCrop::dinov2(224, 96, 8, BlurRule::Paper);
    if !rules.format.is_rgb8() {
        multicrop = multicrop.into_multichannel(0.0, 0.0);
    }
    let mut maker = ViewMaker::default();
    let n_samples: usize = shards.iter().map(|shard| shard.len()).sum();
    let every = (n_samples / N_TIMED).max(1);
    let all = shards.iter().flat_map(|shard| (0..shard.len()).map(move |i| (shard, i)));
    let mut n_done = 0u32;
    let mut seconds = 0.0;
    for (index, (shard, i)) in all.enumerate().step_by(every).take(N_TIMED) {
        let Ok(encoded) = shard.image(i) else { continue };
        let start = Instant::now();
        let key = SampleKey { seed: 0, epoch: 0, sample: index as u64, attempt: 0 };
        let Ok(image) = Image::decode(&encoded.files(), rules) else { continue };
        if maker.make(&image, &multicrop, key).is_ok() {
            seconds += start.elapsed().as_secs_f64();
            n_done += 1;
        }
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    if seconds > 0.0 { cores * f64::from(n_done) / seconds } else { 0.0 }
}
