//! `ocelli shards stats`: reports the contents of a data set, and how fast it will load.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use augment::facts::{ColorKind, Facts, facts};
use augment::{
    BlurRule, DecodeRules, Depth, Fill, Image, MultiCrop, PixelFormat, SampleKey, ViewMaker, bands,
};
use pipeline::shard::image::EncodedImage;
use pipeline::{PipelineError, Shard, Storage};
use rayon::prelude::*;
use report::picture::histogram::{Histogram, draw_histograms};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use super::constants::ChannelSums;
use crate::network_flags::{ValueFlags, depth};
use crate::parts::{PartFlags, compute_share, folder};
use crate::progress::bar;
use prep::bits::BitsUsed;
use prep::open::split_folders;
use prep::parts::{PartResults, identities, open_folders};

/// Number of images whose views are timed for the prediction.
const N_TIMED: usize = 64;

/// Flags of `shards stats`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli shards stats 'data/train-*.tar' --picture sizes.png\n  ocelli shards \
        stats tiles/ --channels 13 --bits 16\n  ocelli shards stats data/ --part 3/16 --out parts/\n  \
        ocelli shards stats data/ --join 16 --out parts/"
)]
pub(crate) struct Args {
    /// Shards: paths, patterns such as 'train-*.tar', folders, or URLs.
    #[arg(required = true)]
    shards: Vec<String>,
    #[command(flatten)]
    format: FormatFlags,
    #[command(flatten)]
    parts: PartFlags,
    /// Output folder for the results of parts.
    #[arg(long, value_name = "FOLDER", help_heading = "In parts")]
    out: Option<PathBuf>,
    /// Also draw size distributions into this PNG file.
    #[arg(long)]
    picture: Option<PathBuf>,
    /// Print a line of JSON at the end.
    #[arg(long)]
    json: bool,
}

/// Flags of the format of pixels.
#[derive(clap::Args)]
struct FormatFlags {
    /// Channels per image, like the recipe's data.channels.
    #[arg(long, value_name = "N", default_value_t = 3)]
    channels: usize,
    /// Bits per channel, like the recipe's data.bits: 8, 16 or 32 (floating point).
    #[arg(long = "bits", value_name = "BITS", default_value = "8", value_parser = depth)]
    depth: Depth,
    #[command(flatten)]
    values: ValueFlags,
}

impl FormatFlags {
    /// Returns the rules for decoding, by which pixels that stand for no data get `fill`.
    fn rules(&self, fill: Fill) -> anyhow::Result<DecodeRules> {
        let format = PixelFormat { n_channels: self.channels, depth: self.depth };
        format.validate().map_err(|reason| anyhow::anyhow!("--channels: {reason}"))?;
        self.values.check(format)?;
        let no_data = self.values.no_data(fill);
        Ok(DecodeRules { format, bits_used: self.values.bits_used, no_data, ..DecodeRules::default() })
    }
}

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
struct Stats {
    n_samples: u64,
    n_no_image: u64,
    n_bad: u64,
    /// Hash of each image, in hexadecimal digits.
    hashes: Vec<String>,
    classes: BTreeMap<String, u64>,
    n_unlabeled: u64,
    /// Images whose class is their folder within an archive.
    n_by_folder: u64,
    formats: BTreeMap<String, u64>,
    n_progressive: u64,
    n_turned: u64,
    colors: BTreeMap<String, u64>,
    widths: Vec<f64>,
    heights: Vec<f64>,
    aspects: Vec<f64>,
    sizes_kb: Vec<f64>,
    shard_mb: Vec<f64>,
    /// Sums of each shard: floating-point sums depend on their order, which is that of one job for
    /// any parts.
    sums: Vec<ChannelSums>,
    /// Numbers of images of other formats, by format.
    others: BTreeMap<String, u64>,
    /// Images of 16 bits.
    n_wide: u64,
    /// The largest of their values.
    largest: u16,
    /// Numbers of images that state a value for pixels without data, by value.
    no_data: BTreeMap<String, u64>,
    decode_s: f64,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let rules = args.format.rules(Fill::Missing)?;
    let given = split_folders(&args.shards)?;
    let sources = given.sources(storage)?;
    let about = json!({
        "shards": identities(&sources, args.parts.work()),
        "channels": args.format.channels,
        "bits": args.format.depth.bits(),
        "bits_used": rules.bits_used,
        "no_data": args.format.values.no_data,
    });
    let work = args.parts.work();
    let results = PartResults::new(folder(args.out.as_deref(), work)?, "stats", about);
    let folders = open_folders(&given, work)?;
    let parts = compute_share(&results, work, sources.len(), |range| {
        let shards = storage.open_all(&sources[range])?;
        collect_stats(&shards.iter().chain(&folders).collect::<Vec<_>>(), &rules)
    })?;
    let Some(parts) = parts else { return Ok(ExitCode::SUCCESS) };
    let mut stats = Stats::default();
    for part in parts {
        stats.append(part);
    }
    let shards = storage.open_all(&sources)?;
    let filled = args.format.rules(Fill::default())?;
    let predicted = predicted_images_per_s(&shards.iter().chain(&folders).collect::<Vec<_>>(), &filled);
    print(&stats, predicted, &filled);
    if let Some(path) = &args.picture {
        draw_histograms(path, &stats.histograms())?;
        out!("picture: {}", path.display());
    }
    if args.json {
        out!("{}", stats.to_json(predicted));
    }
    Ok(ExitCode::SUCCESS)
}

/// Computes the statistics of `shards`.
fn collect_stats(shards: &[&Shard], rules: &DecodeRules) -> anyhow::Result<Stats> {
    let progress = bar(shards.iter().map(|shard| shard.len() as u64).sum(), "stats");
    let mut stats = Stats::default();
    for shard in shards {
        let samples: Result<Vec<Option<SampleStats>>, _> = (0..shard.len())
            .into_par_iter()
            .map(|i: usize| {
                progress.inc(1);
                sample_stats(shard, i, rules)
            })
            .collect();
        stats.shard_mb.push(shard.index().shard_bytes as f64 / 1e6);
        stats.sums.push(ChannelSums::default());
        for sample in samples? {
            stats.add(sample);
        }
    }
    progress.finish_and_clear();
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

/// Returns the format that the headers of an image's files state; `None` if they cannot be read.
fn header_format(files: &[&[u8]], rules: &DecodeRules) -> Option<PixelFormat> {
    let bands::SampleHeader { n_channels, depth, .. } = bands::sample_header(files, rules).ok()?;
    Some(PixelFormat { n_channels, depth })
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
    fn n_duplicates(&self) -> u64 {
        let distinct: HashSet<&String> = self.hashes.iter().collect();
        (self.hashes.len() - distinct.len()) as u64
    }

    /// Returns the mean and the standard deviation of each channel.
    fn constants(&self) -> (Vec<f64>, Vec<f64>) {
        let mut all = ChannelSums::default();
        // A shard without a readable image has no channels.
        for sums in self.sums.iter().filter(|sums| **sums != ChannelSums::default()) {
            all.add(sums);
        }
        all.constants()
    }

    fn histograms(&self) -> Vec<Histogram> {
        [
            ("width, pixels", &self.widths),
            ("height, pixels", &self.heights),
            ("width / height", &self.aspects),
            ("encoded, kB", &self.sizes_kb),
        ]
        .map(|(name, values)| (name.to_string(), values.clone()))
        .into()
    }

    fn to_json(&self, predicted: f64) -> Value {
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
            "predicted_images_per_s": predicted,
        })
    }
}

/// Adds the numbers of `others` to those of `counts`, by name.
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
fn quantiles(values: &[f64]) -> [f64; 3] {
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
fn predicted_images_per_s(shards: &[&Shard], rules: &DecodeRules) -> f64 {
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
    for (number, (shard, i)) in all.enumerate().step_by(every).take(N_TIMED) {
        let Ok(encoded) = shard.image(i) else { continue };
        let start = Instant::now();
        let key = SampleKey { seed: 0, epoch: 0, sample: number as u64, attempt: 0 };
        let Ok(image) = Image::decode(&encoded.files(), rules) else { continue };
        if maker.make(&image, &multicrop, key).is_ok() {
            seconds += start.elapsed().as_secs_f64();
            n_done += 1;
        }
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    if seconds > 0.0 { cores * f64::from(n_done) / seconds } else { 0.0 }
}

fn print(stats: &Stats, predicted: f64, rules: &DecodeRules) {
    out!("{:<16} {:>10} {:>10} {:>10}", "", "smallest", "median", "largest");
    print_quantiles("width", &stats.widths, "pixels");
    print_quantiles("height", &stats.heights, "pixels");
    print_quantiles("width / height", &stats.aspects, "");
    print_quantiles("encoded", &stats.sizes_kb, "kB");
    print_quantiles("shard", &stats.shard_mb, "MB");
    out!(
        "samples          {} in {} shard(s); {} without an image, {} corrupt, {} exact duplicates",
        stats.n_samples,
        stats.shard_mb.len(),
        stats.n_no_image,
        stats.n_bad,
        stats.n_duplicates()
    );
    let folders = match stats.n_by_folder {
        0 => String::new(),
        n => format!("; {n} labeled by their folder in the archive"),
    };
    out!("classes          {}; {} samples without a label{folders}", stats.classes.len(), stats.n_unlabeled);
    out!("formats          {}; {} progressive", join_counts(&stats.formats), stats.n_progressive);
    let applies = if stats.n_turned > 0 { " (applied only with data.apply_exif=true)" } else { "" };
    out!("colors           {}; {} rotated by EXIF{applies}", join_counts(&stats.colors), stats.n_turned);
    print_constants(stats, rules);
    out!(
        "speed            {:.1} ms to decode an image; about {predicted:.0} images/s with DINOv2 \
         multi-crop on this machine",
        1e3 * stats.decode_s / (stats.widths.len().max(1) as f64)
    );
}

fn print_quantiles(name: &str, values: &[f64], unit: &str) {
    let [low, p50, high] = quantiles(values);
    out!("{name:<16} {low:>10.1} {p50:>10.1} {high:>10.1}  {unit}");
}

fn join_counts(counts: &BTreeMap<String, u64>) -> String {
    counts.iter().map(|(name, n)| format!("{n} {name}")).collect::<Vec<_>>().join(", ")
}

/// Prints which bits are used, and which pixels stand for no data, where no flag says it.
fn print_notes(stats: &Stats, rules: &DecodeRules) {
    let used = BitsUsed { n_images: stats.n_wide, largest: stats.largest };
    if let Some(sentence) = used.describe(rules, "data.bits_used in a recipe scales them") {
        out!("bits             {sentence}");
    }
    if rules.no_data.is_none() {
        for (value, n) in &stats.no_data {
            out!(
                "no data          {n} images declare {value} as their no-data value: pass --no-data \
                 {value} to exclude it"
            );
        }
    }
}

/// Prints the constants of each channel, and how a recipe states them if pixels are not 8-bit RGB.
fn print_constants(stats: &Stats, rules: &DecodeRules) {
    let format = rules.format;
    print_notes(stats, rules);
    for (other, n) in &stats.others {
        out!("other pixels     {n} images have {other}, not {format}");
    }
    let (mean, deviation) = stats.constants();
    if format.is_rgb8() {
        let [mean, deviation] = [mean, deviation]
            .map(|values| values.iter().map(|value| format!("{value:.3}")).collect::<Vec<_>>().join(" "));
        out!("channels         mean {mean}, deviation {deviation}");
        return;
    }
    out!("channels         {format}; for a recipe:");
    out!("  [data]");
    out!("  channels = {}", format.n_channels);
    out!("  bits = {}", format.depth.bits());
    if let Some(bits) = rules.bits_used {
        out!("  bits_used = {bits}");
    }
    if let Some(no_data) = rules.no_data {
        let value = no_data.value.map_or(String::new(), |value| format!("value = {value}, "));
        out!("  no_data = {{ {value}fill = \"mean\" }}");
    }
    // With the digits of single precision, whatever the size of the values.
    let [mean, deviation] = [mean, deviation]
        .map(|values| values.iter().map(|value| (*value as f32).to_string()).collect::<Vec<_>>().join(", "));
    out!("  normalization = {{ mean = [{mean}], std = [{deviation}] }}");
}
