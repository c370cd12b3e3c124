//! `ocelli shards stats`: reports the contents of a data set, and how fast it will load.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use augment::{DecodeRules, Depth, Fill, PixelFormat};
use pipeline::Storage;
use pipeline::words::{counted, thousands};
use prep::bits::BitsUsed;
use prep::parts::ReadJob;
use prep::stats::{Stats, quantiles, stats};
use report::picture::histogram::draw_histograms;
use session::check_pixel_values;

use crate::network_flags::{ValueFlags, depth};
use crate::parts::{PartFlags, result_of_all};
use crate::progress::StageBar;

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
    /// Returns the rules for decoding.
    fn rules(&self) -> anyhow::Result<DecodeRules> {
        let format = PixelFormat { n_channels: self.channels, depth: self.depth };
        format.validate().map_err(|reason| anyhow::anyhow!("--channels: {reason}"))?;
        let bits_used = self.values.bits_used;
        let no_data = self.values.no_data(Fill::default());
        check_pixel_values(format, bits_used, no_data)?;
        Ok(DecodeRules { format, bits_used, no_data, ..DecodeRules::default() })
    }
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let rules = args.format.rules()?;
    let work = args.parts.work();
    let job = ReadJob { specs: &args.shards, rules: &rules, work, out: args.out.as_deref() };
    let share = stats(&job, storage, &StageBar::new())?;
    let Some(stats) = result_of_all(share) else { return Ok(ExitCode::SUCCESS) };
    print(&stats, &rules);
    if let Some(path) = &args.picture {
        let histograms = [
            ("width, pixels", &stats.widths),
            ("height, pixels", &stats.heights),
            ("width / height", &stats.aspects),
            ("encoded, kB", &stats.sizes_kb),
        ];
        draw_histograms(path, &histograms.map(|(name, values)| (name.to_string(), values.clone())))?;
        out!("picture: {}", path.display());
    }
    if args.json {
        out!("{}", stats.to_json());
    }
    Ok(ExitCode::SUCCESS)
}

fn print(stats: &Stats, rules: &DecodeRules) {
    if stats.widths.is_empty() {
        print_unusable(stats, rules);
        return;
    }
    out!("{:<16} {:>10} {:>10} {:>10}", "", "smallest", "median", "largest");
    print_quantiles("width", &stats.widths, "pixels");
    print_quantiles("height", &stats.heights, "pixels");
    print_quantiles("width / height", &stats.aspects, "");
    print_quantiles("encoded", &stats.sizes_kb, "kB");
    print_quantiles("shard", &stats.shard_mb, "MB");
    out!(
        "samples          {} in {}; {} without an image, {} corrupt, {}",
        thousands(stats.n_samples),
        counted(stats.shard_mb.len() as u64, "shard"),
        thousands(stats.n_no_image),
        thousands(stats.n_bad),
        counted(stats.n_duplicates(), "exact duplicate")
    );
    let folders = match stats.n_by_folder {
        0 => String::new(),
        n => format!("; {} labeled by their folder in the archive", thousands(n)),
    };
    let n_classes = thousands(stats.classes.len() as u64);
    let unlabeled = counted(stats.n_unlabeled, "sample");
    out!("classes          {n_classes}; {unlabeled} without a label{folders}");
    let progressive = thousands(stats.n_progressive);
    out!("formats          {}; {progressive} progressive", join_counts(&stats.formats));
    let turned = match stats.n_turned {
        0 => "EXIF turns none".to_string(),
        n => format!("EXIF turns {} (applied only with data.apply_exif=true)", counted(n, "image")),
    };
    out!("colors           {}; {turned}", join_counts(&stats.colors));
    print_constants(stats, rules);
    out!(
        "speed            {:.1} ms to decode an image; about {:.0} images/s with DINOv2 \
         multi-crop on this machine",
        1e3 * stats.decode_s / (stats.widths.len().max(1) as f64),
        stats.predicted_images_per_s
    );
}

/// Prints what is known of images of which none can be decoded.
fn print_unusable(stats: &Stats, rules: &DecodeRules) {
    out!(
        "samples          {} in {}; {} without an image, and none of the others can be decoded",
        thousands(stats.n_samples),
        counted(stats.shard_mb.len() as u64, "shard"),
        thousands(stats.n_no_image)
    );
    if stats.others.is_empty() {
        out!("`ocelli shards verify` says why");
    }
    print_others(stats, rules);
}

/// Prints the numbers of images of other pixel formats, with the flags that read them.
fn print_others(stats: &Stats, rules: &DecodeRules) {
    for (other, n) in &stats.others {
        let flags = format_flags(other).map_or(String::new(), |flags| format!(": {flags} reads them"));
        out!("other pixels     {} of {other}, not {}{flags}", counted(*n, "image"), rules.format);
    }
}

/// Returns the flags for a format in words, such as `5 channels of 16 bits`.
fn format_flags(format: &str) -> Option<String> {
    let (channels, rest) = format.split_once(' ')?;
    let (_, bits) = rest.split_once("of ")?;
    let (bits, _) = bits.split_once(' ')?;
    Some(format!("--channels {channels} --bits {bits}"))
}

fn print_quantiles(name: &str, values: &[f64], unit: &str) {
    let [low, p50, high] = quantiles(values);
    out!("{name:<16} {low:>10.1} {p50:>10.1} {high:>10.1}  {unit}");
}

fn join_counts(counts: &BTreeMap<String, u64>) -> String {
    counts.iter().map(|(name, n)| format!("{} {name}", thousands(*n))).collect::<Vec<_>>().join(", ")
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
                "no data          {} with {value} as declared no-data value: pass --no-data {value} to \
                 exclude it",
                counted(*n, "image")
            );
        }
    }
}

/// Prints the constants of each channel, and how a recipe states them if pixels are not 8-bit RGB.
fn print_constants(stats: &Stats, rules: &DecodeRules) {
    let format = rules.format;
    print_notes(stats, rules);
    print_others(stats, rules);
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
