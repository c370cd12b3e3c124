//! `ocelli shards pack`: packs a folder of images, or a list of them, into shards.

use std::path::PathBuf;
use std::process::ExitCode;

use pipeline::ColumnNames;
use pipeline::shard::write::ShardLimits;
use pipeline::words::{counted, thousands};
use prep::names::{shard_list, shard_pattern};
use prep::pack::{PackJob, Packed, no_images, pack};
use prep::parts::Work;
use prep::urls::{PackedUrls, WebRules, pack_urls};
use report::shell_quote;

use crate::console::say;
use crate::parts::PartFlags;
use crate::progress::{StageBar, format_time};
use crate::shards::limits::max_bytes;
use crate::storage::jitter_seed;

/// Flags of `shards pack`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli shards pack photos/ --out shards/\n  ocelli shards pack list.csv \
        --out shards/ --prefix train\n  ocelli shards pack urls.csv --urls --out shards/"
)]
pub(crate) struct Args {
    /// Folder of images (flat, or one sub-folder per class); a .csv, .tsv or .jsonl list with a
    /// column `path` and optionally `label`; or a .txt list. Paths are relative to the list.
    input: PathBuf,
    /// Output folder for the shards.
    #[arg(long)]
    out: PathBuf,
    /// Prefix of the shard names.
    #[arg(long, default_value = "train")]
    prefix: String,
    /// Maximum number of samples per shard, at least 1.
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = crate::values::at_least_one)]
    samples_per_shard: u64,
    /// Maximum size of a shard in bytes, counting image files; 0 for no limit. Ignored with --urls,
    /// where only the number of samples counts.
    #[arg(long, value_name = "N", default_value_t = 1 << 30, hide_short_help = true)]
    bytes_per_shard: u64,
    /// Class list that defines the numbering, one name per line, such as the classes.txt of another
    /// pack. Without it, numeric labels are kept as they are, and names are numbered
    /// alphabetically.
    #[arg(long)]
    classes: Option<PathBuf>,
    /// Seed for the order in which samples are packed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Combine single-band files, such as tile.b02.tif and tile.b08.tif, into one sample. Channels
    /// are in the order of the file names, with numbers sorted by value.
    #[arg(long, conflicts_with = "urls")]
    bands: bool,
    /// Print a line of JSON at the end.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    parts: PartFlags,
    #[command(flatten)]
    web: WebFlags,
}

/// Flags of packing from the web.
#[derive(clap::Args)]
#[command(
    mut_arg("connections", |arg| arg.hide_short_help(true)),
    mut_arg("per_host", |arg| arg.hide_short_help(true)),
    mut_arg("retries", |arg| arg.hide_short_help(true)),
    mut_arg("timeout_s", |arg| arg.hide_short_help(true)),
    mut_arg("max_mb", |arg| arg.hide_short_help(true)),
    mut_arg("ignore_opt_out", |arg| arg.hide_short_help(true))
)]
struct WebFlags {
    /// Fetch the URLs in the list's column `url`. All columns are kept; passwords and tokens in
    /// addresses are not.
    #[arg(long, help_heading = "From the web")]
    urls: bool,
    /// Number of images to fetch at a time.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..),
        requires = "urls", help_heading = "From the web")]
    connections: u32,
    /// Number of images to fetch from one server at a time.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..),
        requires = "urls", help_heading = "From the web")]
    per_host: u32,
    /// Number of retries per image.
    #[arg(long, default_value_t = 2, requires = "urls", help_heading = "From the web")]
    retries: u32,
    /// Timeout in seconds for fetching an image, including all retries.
    #[arg(long, default_value_t = 60, value_parser = crate::values::at_least_one,
        requires = "urls", help_heading = "From the web")]
    timeout_s: u64,
    /// Maximum size of an image, in megabytes.
    #[arg(long, default_value_t = 50, value_parser = crate::values::at_least_one,
        requires = "urls", help_heading = "From the web")]
    max_mb: u64,
    /// Fetch images even if their owners opt out with an X-Robots-Tag (noai, noimageai, noindex,
    /// noimageindex, none).
    #[arg(long, requires = "urls", help_heading = "From the web")]
    ignore_opt_out: bool,
    /// Delete the output of another pack in the folder and start over.
    #[arg(long, requires = "urls", help_heading = "From the web")]
    overwrite: bool,
}

impl Args {
    /// Returns the job that the flags describe; `columns` are those that the user has named.
    fn job<'a>(&'a self, columns: &'a ColumnNames) -> PackJob<'a> {
        let max_bytes = max_bytes(self.bytes_per_shard);
        PackJob {
            input: &self.input,
            columns,
            out: &self.out,
            prefix: &self.prefix,
            limits: ShardLimits { max_samples: self.samples_per_shard, max_bytes },
            classes: self.classes.as_deref(),
            overwrite: self.web.overwrite,
            seed: self.seed,
            joins_bands: self.bands,
            work: self.parts.work(),
        }
    }
}

pub(crate) fn run(args: &Args, columns: &ColumnNames) -> anyhow::Result<ExitCode> {
    let job = args.job(columns);
    if args.web.urls { run_urls(args, &job) } else { run_files(args, &job) }
}

fn run_files(args: &Args, job: &PackJob<'_>) -> anyhow::Result<ExitCode> {
    let packed = pack(job, &StageBar::new())?;
    if packed.n_samples == 0 {
        if let Some((_, n)) = &packed.failures
            && let Some(first) = &packed.first_failure
        {
            say(format!("first of {n} failed images: {first}"));
        }
        if !matches!(job.work, Work::Part(_)) {
            return Err(no_images(job).into());
        }
    }
    print_packed(args, &packed);
    Ok(ExitCode::SUCCESS)
}

fn print_packed(args: &Args, packed: &Packed) {
    let Packed { n_samples, n_classes, n_shards, shards, n_empty, n_existing, .. } = packed;
    let existing = match *n_existing {
        0 => String::new(),
        n => format!(", {} of them already done", thousands(n as u64)),
    };
    let classes = counted(*n_classes as u64, "class");
    let contents = format!("{} of {classes}", counted(*n_samples, "sample"));
    let written = counted((n_shards - n_empty) as u64, "shard");
    let work = args.parts.work();
    match work {
        Work::Part(part) => {
            let n_written = thousands((shards.len() - n_empty) as u64);
            let all = counted(*n_shards as u64, "shard");
            out!("part {part}: {contents} in {n_written} of {all}{existing}");
        }
        Work::Join(_) => out!("{contents} in {written}:"),
        Work::Whole => out!("{contents} in {written}{existing}:"),
    }
    if !matches!(work, Work::Part(_)) {
        out!("{}", names_of_shards(args, *n_shards, *n_empty));
    }
    packed.report();
    if args.json {
        out!("{}", packed.to_json());
    }
}

/// Names the shards of the job, `n_empty` of whose `n_shards` are left out.
fn names_of_shards(args: &Args, n_shards: usize, n_empty: usize) -> String {
    if n_empty > 0 {
        return shard_pattern(&args.out, &args.prefix);
    }
    shard_list(&args.out, &args.prefix, n_shards)
}

fn run_urls(args: &Args, job: &PackJob<'_>) -> anyhow::Result<ExitCode> {
    let web = WebRules {
        connections: args.web.connections as usize,
        per_host: args.web.per_host as usize,
        retries: args.web.retries,
        timeout_s: args.web.timeout_s,
        max_mb: args.web.max_mb,
        ignore_opt_out: args.web.ignore_opt_out,
        jitter_seed: jitter_seed(),
    };
    let progress = StageBar::new();
    let packed = pack_urls(job, &web, &progress, &|n_failed| {
        progress.set_message(format!("{n_failed} failed"));
    })?;
    drop(progress);
    print_urls(args, job.columns, &packed);
    // Some rows always fail; if all fail, there is no data set.
    let is_part = matches!(job.work, Work::Part(_));
    let is_empty = packed.n_failed_in_all == packed.n_rows && !is_part;
    Ok(if is_empty { ExitCode::from(3) } else { ExitCode::SUCCESS })
}

/// Prints the counts of this command's share, and how to retry the rows that have failed.
fn print_urls(args: &Args, columns: &ColumnNames, packed: &PackedUrls) {
    let PackedUrls { n_fetched, n_failed, seconds, n_rows, n_failed_in_all, n_shards, n_empty, .. } = packed;
    out!(
        "{} fetched, {} failed; {:.1} MB in {} ({:.1} images/s)",
        counted(*n_fetched, "image"),
        thousands(*n_failed),
        packed.bytes as f64 / 1e6,
        format_time(*seconds),
        *n_fetched as f64 / seconds
    );
    let failed =
        format!("{} of {} failed", thousands(*n_failed_in_all as u64), counted(*n_rows as u64, "row"));
    if let Work::Part(part) = args.parts.work() {
        let n_written = thousands((packed.shards.len() - n_empty) as u64);
        out!("part {part}: {n_written} of {}; {failed}", counted(*n_shards as u64, "shard"));
    } else {
        out!("{}", names_of_shards(args, *n_shards, *n_empty));
    }
    if let Some(list) = &packed.failures
        && *n_failed_in_all > 0
    {
        let list = list.display();
        out!("{failed} in total; reasons: {list}");
        // The list may hold only some of the classes, whose numbers would change.
        let mut same_classes = String::new();
        if packed.has_class_names {
            same_classes = format!(" --classes {}", args.out.join("classes.txt").display());
        }
        // Failed rows have all columns, and the address under `url`.
        let mut same_label = String::new();
        if let Some(label) = &columns.label {
            same_label = format!(" --label-column {}", shell_quote(label));
        }
        out!("to retry them: ocelli shards pack {list} --urls{same_classes}{same_label} --out ...");
    }
    let n_existing = packed.n_existing();
    if n_existing > 0 {
        out!("{} already done", counted(n_existing, "row"));
    }
    if args.json {
        out!("{}", packed.to_json());
    }
}
