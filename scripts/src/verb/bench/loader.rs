//! `ocelli bench loader`: measures the speed of the data path alone, and names its bottleneck.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::bail;
use augment::stats::StageSnapshot;
use augment::{BlurRule, DecodeRules, MultiCrop, ViewMix};
use kernels::device::workers::n_or_all_cores;
use pipeline::read::stats::ReadSnapshot;
use pipeline::{Cursor, Dataset, Loader, LoaderConfig, Order, Quarantine, Share, Storage};
use serde_json::{Map, Value, json};
use trainer::run::data::{StreamConfig, stream};

use super::compare::{CompareFlag, compare_figures};
use crate::recipes;
use prep::open::open_dataset;

/// Flags of `bench loader`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Shards to read.
    #[arg(required = true)]
    shards: Vec<String>,
    /// Views per image: dino or dinov2 (2 views of 224 px and 8 of 96), single (one of 224,
    /// randomly flipped), read (none), or a recipe name or file.
    #[arg(long, default_value = "dinov2")]
    recipe: String,
    /// Number of decoding and augmenting threads; 0 for one per core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Seconds to measure, after a warm-up of a fifth of that.
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Images per batch.
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Override a recipe value. Can be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    #[command(flatten)]
    compare: CompareFlag,
    /// Print a line of JSON at the end: images_per_s, mb_per_s, stages.
    #[arg(long)]
    json: bool,
}

/// Measurements of the loader.
struct Measured {
    wall: Duration,
    n_threads: usize,
    images: u64,
    /// Times at which images were taken, with the number of images taken by then.
    taken: Vec<(Duration, u64)>,
    bytes: u64,
    read: ReadSnapshot,
    /// Number of threads that read.
    n_readers: usize,
    /// Stages of the augmenting threads; `None` if nothing is decoded.
    augment: Option<StageSnapshot>,
    /// Mean fill of the queues.
    queues: Queues,
}

/// Fill of the queues.
#[derive(Default)]
struct Queues {
    /// Share of the byte limit that is in use.
    bytes: f64,
    /// Number of images that are read and wait for a thread.
    read: f64,
    /// Number of images that are finished and wait for their batch or its consumer.
    finished: f64,
}

/// Number of shards whose samples are shuffled together, as in recipes.
const WINDOW_SHARDS: usize = 16;

/// Number of parts of the measured time; their rates show how steady the loader is.
const PARTS: usize = 5;

/// One line of the table.
struct LoaderRow {
    name: &'static str,
    p50: Duration,
    p99: Duration,
    /// Share of the time of the threads that run the stage.
    share: f64,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let is_preset = ["dino", "dinov2", "single", "read"].contains(&args.recipe.as_str());
    if is_preset && !args.overrides.is_empty() {
        bail!("--set needs a recipe; {} is a preset of views", args.recipe);
    }
    let before = args.compare.read()?;
    let dataset = Arc::new(open_dataset(&args.shards, storage)?);
    dataset.check_cache(WINDOW_SHARDS)?;
    let measured = match args.recipe.as_str() {
        "read" => measure_reading(args, dataset)?,
        _ => measure_augmented(args, dataset)?,
    };
    print(args, &measured);
    let figures = measured.figures(args);
    if let Some(before) = before {
        for line in compare_figures(&before, &figures) {
            out!("{line}");
        }
    }
    if args.json {
        out!("{figures}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the views that the flags name, and the rules for decoding.
fn views(args: &Args) -> anyhow::Result<(ViewMix, DecodeRules)> {
    let multicrop = match args.recipe.as_str() {
        "dino" => MultiCrop::dino(224, 96, 8),
        "dinov2" => MultiCrop::dinov2(224, 96, 8, BlurRule::Paper),
        "single" => MultiCrop::single(224),
        name => {
            let recipe = recipes::load(name, &args.overrides)?;
            return Ok((recipe.views.view_mix().map_err(anyhow::Error::msg)?, recipe.data.rules()));
        }
    };
    Ok((multicrop.into(), DecodeRules::default()))
}

/// Opens a temporary quarantine of this process, with its path: a benchmark leaves no files.
fn quarantine() -> anyhow::Result<(Arc<Quarantine>, std::path::PathBuf)> {
    let path = std::env::temp_dir().join(format!("ocelli-bench-{}.jsonl", std::process::id()));
    Ok((Arc::new(Quarantine::open(&path, 1.0)?), path))
}

/// Measures reading, decoding and augmenting.
fn measure_augmented(args: &Args, dataset: Arc<Dataset>) -> anyhow::Result<Measured> {
    let n_threads = n_or_all_cores(args.threads);
    let (quarantine, ledger) = quarantine()?;
    let loader = LoaderConfig::default();
    let (views, rules) = views(args)?;
    let config = StreamConfig { views, seed: 0, window_shards: WINDOW_SHARDS, n_threads, rules, loader };
    let mut pool = stream(dataset, config, Share::solo(args.batch)?, Cursor(0), quarantine);
    let mut queues = Queues::default();
    let mut n_batches = 0u64;
    let mut taken = Vec::new();
    let mut start = Instant::now();
    let mut is_warm = false;
    loop {
        let Some(batch) = pool.next_batch() else { bail!("the shards ended") };
        pool.recycle(batch?);
        if !is_warm && start.elapsed().as_secs_f64() >= args.seconds / 5.0 {
            is_warm = true;
            pool.stats().reset();
            pool.source().loader().stats().reset();
            start = Instant::now();
            continue;
        }
        if is_warm {
            n_batches += 1;
            taken.push((start.elapsed(), n_batches * args.batch as u64));
            queues.bytes += pool.source().loader().fill();
            queues.read += pool.source().loader().queue_len() as f64;
            queues.finished += pool.n_waiting() as f64;
        }
        if is_warm && start.elapsed().as_secs_f64() >= args.seconds {
            break;
        }
    }
    let wall = start.elapsed();
    let augment = pool.stats().snapshot();
    let read = pool.source().loader().stats().snapshot();
    drop(pool);
    // Without bad samples there is no ledger.
    let _ = std::fs::remove_file(ledger);
    let n = n_batches.max(1) as f64;
    Ok(Measured {
        wall,
        n_threads,
        images: augment.images,
        taken,
        bytes: augment.bytes,
        read,
        n_readers: loader.n_threads,
        augment: Some(augment),
        queues: Queues { bytes: queues.bytes / n, read: queues.read / n, finished: queues.finished / n },
    })
}

/// Measures reading alone.
fn measure_reading(args: &Args, dataset: Arc<Dataset>) -> anyhow::Result<Measured> {
    let n_threads = n_or_all_cores(args.threads);
    let (quarantine, ledger) = quarantine()?;
    let order = Order::new(0, dataset.shard_sizes(), 16);
    let share = Share::solo(args.batch)?;
    let config = LoaderConfig { n_threads, ..LoaderConfig::default() };
    let loader = Loader::start(dataset, order, share, Cursor(0), quarantine, config);
    // Number of images taken of each batch from `first_open` on.
    let mut counts = vec![0usize; 1];
    let mut first_open = 0u64;
    let mut start = Instant::now();
    let mut is_warm = false;
    let mut queues = Queues::default();
    let mut n = 0u64;
    let mut taken = Vec::new();
    while !is_warm || start.elapsed().as_secs_f64() < args.seconds {
        let Some(item) = loader.next_item() else { bail!("the shards ended") };
        let batch = (item?.batch - first_open) as usize;
        counts.resize(counts.len().max(batch + 1), 0);
        counts[batch] += 1;
        while counts.first() == Some(&args.batch) {
            counts.remove(0);
            loader.finish_batch(first_open);
            first_open += 1;
        }
        if !is_warm && start.elapsed().as_secs_f64() >= args.seconds / 5.0 {
            is_warm = true;
            loader.stats().reset();
            start = Instant::now();
        } else if is_warm && n.is_multiple_of(64) {
            queues.bytes += loader.fill();
            queues.read += loader.queue_len() as f64;
            taken.push((start.elapsed(), n));
        }
        n += u64::from(is_warm);
    }
    let wall = start.elapsed();
    let read = loader.stats().snapshot();
    drop(loader);
    let _ = std::fs::remove_file(ledger);
    let sampled = n.div_ceil(64).max(1) as f64;
    Ok(Measured {
        wall,
        n_threads,
        images: n,
        taken,
        bytes: read.bytes,
        read,
        n_readers: n_threads,
        augment: None,
        queues: Queues { bytes: queues.bytes / sampled, read: queues.read / sampled, finished: 0.0 },
    })
}

impl Measured {
    fn images_per_s(&self) -> f64 {
        self.images as f64 / self.wall.as_secs_f64()
    }

    /// Returns the rates of the slowest and the fastest of five parts of the time.
    fn range_per_s(&self) -> [f64; 2] {
        let part_s = self.wall.as_secs_f64() / PARTS as f64;
        let mut slowest = f64::INFINITY;
        let mut fastest = 0.0f64;
        for part in 0..PARTS {
            let (from_s, before) = self.last_taken(part_s * part as f64);
            let (to_s, after) = self.last_taken(part_s * (part + 1) as f64);
            let rate = if to_s > from_s { (after - before) as f64 / (to_s - from_s) } else { 0.0 };
            slowest = slowest.min(rate);
            fastest = fastest.max(rate);
        }
        [slowest, fastest]
    }

    /// Returns the time in seconds at which the last image before `end_s` was taken, and the number
    /// of images taken by then.
    fn last_taken(&self, end_s: f64) -> (f64, u64) {
        let last = self.taken.iter().take_while(|(at, _)| at.as_secs_f64() <= end_s).last();
        last.map_or((0.0, 0), |(at, n)| (at.as_secs_f64(), *n))
    }

    /// Returns `total` as a share of the time of `n_threads` threads.
    fn share(&self, total: Duration, n_threads: usize) -> f64 {
        total.as_secs_f64() / (self.wall.as_secs_f64() * n_threads as f64)
    }

    fn mb_per_s(&self) -> f64 {
        self.bytes as f64 / 1e6 / self.wall.as_secs_f64()
    }

    fn rows(&self) -> Vec<LoaderRow> {
        let mut rows = vec![LoaderRow {
            name: "read",
            p50: self.read.read_p50,
            p99: self.read.read_p99,
            share: self.share(self.read.read, self.n_readers),
        }];
        for stage in self.augment.iter().flat_map(|augment| &augment.stages) {
            rows.push(LoaderRow {
                name: stage.name,
                p50: stage.p50,
                p99: stage.p99,
                share: self.share(stage.total, self.n_threads),
            });
        }
        rows
    }

    /// Returns the figures as JSON.
    fn figures(&self, args: &Args) -> Value {
        let mut stages = Map::new();
        for row in self.rows() {
            let numbers = json!({
                "p50_ms": row.p50.as_secs_f64() * 1e3,
                "p99_ms": row.p99.as_secs_f64() * 1e3,
                "share": row.share,
            });
            stages.insert(row.name.replace(' ', "_"), numbers);
        }
        json!({
            "recipe": args.recipe,
            "batch_size": args.batch,
            "workers": self.n_threads,
            "images_per_s": self.images_per_s(),
            "images_per_s_range": self.range_per_s(),
            "mb_per_s": self.mb_per_s(),
            "stages": stages,
            "queues": {
                "read": self.queues.read,
                "finished": self.queues.finished,
                "bytes_share": self.queues.bytes,
            },
            "limit": self.verdict(),
        })
    }

    /// Returns a sentence that names the bottleneck.
    fn verdict(&self) -> String {
        let rows = self.rows();
        let waiting = rows.iter().find(|row| row.name == "wait for bytes").map_or(0.0, |row| row.share);
        if self.augment.is_none() {
            return format!(
                "{} threads spend {:.0} % of their time reading and the rest waiting for the consumer.",
                self.n_readers,
                100.0 * rows[0].share
            );
        }
        if waiting > 0.2 {
            return format!(
                "Reading is the bottleneck: threads wait for bytes {:.0} % of the time; use a faster disk \
                 or more readers.",
                100.0 * waiting
            );
        }
        let busiest = rows[2..].iter().max_by(|a, b| a.share.total_cmp(&b.share));
        let (name, share) = busiest.map_or(("nothing", 0.0), |row| (row.name, row.share));
        format!(
            "The CPU is the bottleneck: {} threads wait for bytes {:.0} % of the time; {name} takes the \
             most time, {:.0} %.",
            self.n_threads,
            100.0 * waiting,
            100.0 * share
        )
    }
}

fn print(args: &Args, measured: &Measured) {
    let [slowest, fastest] = measured.range_per_s();
    out!(
        "{}, {} threads, {:.1} s: {:.1} images/s, {slowest:.1} to {fastest:.1} by fifths; {:.1} MB/s",
        args.recipe,
        measured.n_threads,
        measured.wall.as_secs_f64(),
        measured.images_per_s(),
        measured.mb_per_s()
    );
    out!("{:<16} {:>9} {:>9} {:>8}", "per image", "p50 ms", "p99 ms", "share");
    for row in &measured.rows() {
        let p50_ms = row.p50.as_secs_f64() * 1e3;
        let p99_ms = row.p99.as_secs_f64() * 1e3;
        out!("{:<16} {p50_ms:9.3} {p99_ms:9.3} {:6.1} %", row.name, 100.0 * row.share);
    }
    out!(
        "queues: {:.1} images read, {:.1} finished, {:.1} % of the byte limit",
        measured.queues.read,
        measured.queues.finished,
        100.0 * measured.queues.bytes
    );
    out!("{}", measured.verdict());
}
