//! Rate of the data path alone: of reading, or of reading, decoding and augmenting, with the share
//! of the time that each stage takes and the fill of the queues between them, which show what
//! limits the rate.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use augment::stats::StageSnapshot;
use augment::{DecodeRules, ViewMix};
use kernels::device::workers::n_or_all_cores;
use pipeline::read::stats::ReadSnapshot;
use pipeline::{Cursor, Dataset, Loader, LoaderConfig, Order, PipelineError, Quarantine, Share};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::error::TrainError;
use crate::run::data::{StreamConfig, stream};

/// Number of shards whose samples are shuffled together, as in recipes.
const WINDOW_SHARDS: usize = 16;

/// Number of parts of the measured time; their rates show how steady the loader is.
const PARTS: usize = 5;

/// Share of the time that waits for bytes above which reading limits the rate.
const MAX_WAITING: f64 = 0.2;

/// Settings of a measurement.
#[derive(Debug, Clone, Copy)]
pub struct LoaderSettings<'a> {
    /// Number of threads that decode and augment, or that read if nothing is decoded; 0 for one per
    /// core.
    pub n_threads: usize,
    /// Images per batch.
    pub batch_size: usize,
    /// Seconds to measure, after a warm-up of a fifth of that.
    pub seconds: f64,
    /// File for samples that cannot be used, which is removed at the end.
    pub ledger: &'a Path,
}

/// Measurements of the loader.
#[derive(Debug, Clone)]
pub struct LoaderBench {
    /// Measured time.
    pub wall: Duration,
    /// Number of threads of the settings.
    pub n_threads: usize,
    /// Number of threads that read.
    pub n_readers: usize,
    /// Mean fill of the queues.
    pub queues: Queues,
    images: u64,
    /// Times at which images were taken, with the number of images taken by then.
    taken: Vec<(Duration, u64)>,
    bytes: u64,
    read: ReadSnapshot,
    /// Stages of the augmenting threads; `None` if nothing is decoded.
    augment: Option<StageSnapshot>,
}

/// Fill of the queues.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Queues {
    /// Share of the byte limit that is in use.
    pub bytes_share: f64,
    /// Number of images that are read and wait for a thread.
    pub read: f64,
    /// Number of images that are finished and wait for their batch or its consumer.
    pub finished: f64,
}

/// Time that a stage takes.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct LoaderStage {
    /// Name of the stage.
    #[serde(skip)]
    pub name: &'static str,
    /// Median time of an image, in milliseconds.
    pub p50_ms: f64,
    /// 99th percentile of the time of an image, in milliseconds.
    pub p99_ms: f64,
    /// Share of the time of the threads that run the stage.
    pub share: f64,
}

/// What limits the rate, with shares of the threads' time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bottleneck {
    /// Nothing is decoded: threads read for this share, and wait for the consumer otherwise.
    Consumer {
        /// Share of reading.
        reading: f64,
    },
    /// Threads wait for bytes.
    Reading {
        /// Share of waiting.
        waiting: f64,
    },
    /// Threads decode and augment.
    Cpu {
        /// Share of waiting for bytes.
        waiting: f64,
        /// Name of the stage that takes the most time.
        stage: &'static str,
        /// Share of that stage.
        share: f64,
    },
}

/// Measures reading, decoding and augmenting.
///
/// # Errors
/// [`TrainError::Data`].
pub fn measure_views(
    dataset: Arc<Dataset>,
    views: ViewMix,
    rules: DecodeRules,
    settings: &LoaderSettings<'_>,
) -> Result<LoaderBench, TrainError> {
    dataset.check_cache(WINDOW_SHARDS)?;
    let n_threads = n_or_all_cores(settings.n_threads);
    let batch_size = settings.batch_size;
    let quarantine = open_quarantine(settings)?;
    let loader = LoaderConfig::default();
    let config = StreamConfig {
        views,
        seed: 0,
        window_shards: WINDOW_SHARDS,
        n_threads,
        rules,
        n_pixel_classes: None,
        loader,
    };
    let mut pool = stream(dataset, config, Share::solo(batch_size)?, Cursor(0), quarantine);
    let mut queues = Queues::default();
    let mut n_batches = 0u64;
    let mut taken = Vec::new();
    let mut start = Instant::now();
    let mut is_warm = false;
    loop {
        let batch = pool.next_batch().ok_or(TrainError::DataEnded)??;
        pool.recycle(batch);
        if !is_warm && start.elapsed().as_secs_f64() >= settings.seconds / 5.0 {
            is_warm = true;
            pool.stats().reset();
            pool.source().loader().stats().reset();
            start = Instant::now();
            continue;
        }
        if is_warm {
            n_batches += 1;
            taken.push((start.elapsed(), n_batches * batch_size as u64));
            queues.bytes_share += pool.source().loader().fill();
            queues.read += pool.source().loader().queue_len() as f64;
            queues.finished += pool.n_waiting() as f64;
        }
        if is_warm && start.elapsed().as_secs_f64() >= settings.seconds {
            break;
        }
    }
    let wall = start.elapsed();
    let augment = pool.stats().snapshot();
    let read = pool.source().loader().stats().snapshot();
    drop(pool);
    remove_ledger(settings);
    Ok(LoaderBench {
        wall,
        n_threads,
        images: augment.images,
        taken,
        bytes: augment.bytes,
        read,
        n_readers: loader.n_threads,
        augment: Some(augment),
        queues: queues.over(n_batches),
    })
}

/// Measures reading alone.
///
/// # Errors
/// [`TrainError::Data`].
pub fn measure_reading(
    dataset: Arc<Dataset>,
    settings: &LoaderSettings<'_>,
) -> Result<LoaderBench, TrainError> {
    dataset.check_cache(WINDOW_SHARDS)?;
    let n_threads = n_or_all_cores(settings.n_threads);
    let quarantine = open_quarantine(settings)?;
    let order = Order::new(0, dataset.shard_sizes(), WINDOW_SHARDS);
    let share = Share::solo(settings.batch_size)?;
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
    while !is_warm || start.elapsed().as_secs_f64() < settings.seconds {
        let item = loader.next_item().ok_or(TrainError::DataEnded)??;
        let batch = (item.batch - first_open) as usize;
        counts.resize(counts.len().max(batch + 1), 0);
        counts[batch] += 1;
        while counts.first() == Some(&settings.batch_size) {
            counts.remove(0);
            loader.finish_batch(first_open);
            first_open += 1;
        }
        if !is_warm && start.elapsed().as_secs_f64() >= settings.seconds / 5.0 {
            is_warm = true;
            loader.stats().reset();
            start = Instant::now();
        } else if is_warm && n.is_multiple_of(64) {
            queues.bytes_share += loader.fill();
            queues.read += loader.queue_len() as f64;
            taken.push((start.elapsed(), n));
        }
        n += u64::from(is_warm);
    }
    let wall = start.elapsed();
    let read = loader.stats().snapshot();
    drop(loader);
    remove_ledger(settings);
    Ok(LoaderBench {
        wall,
        n_threads,
        images: n,
        taken,
        bytes: read.bytes,
        read,
        n_readers: n_threads,
        augment: None,
        queues: queues.over(n.div_ceil(64)),
    })
}

/// Opens the quarantine of a measurement.
fn open_quarantine(settings: &LoaderSettings<'_>) -> Result<Arc<Quarantine>, PipelineError> {
    Ok(Arc::new(Quarantine::open(settings.ledger, 1.0)?))
}

/// Removes the ledger: a benchmark leaves no files. Without bad samples there is none.
fn remove_ledger(settings: &LoaderSettings<'_>) {
    let _ = std::fs::remove_file(settings.ledger);
}

impl Queues {
    /// Returns the mean of `n` sums.
    fn over(self, n: u64) -> Self {
        let n = n.max(1) as f64;
        Self { bytes_share: self.bytes_share / n, read: self.read / n, finished: self.finished / n }
    }
}

impl LoaderBench {
    /// Returns the images per second.
    pub fn images_per_s(&self) -> f64 {
        self.images as f64 / self.wall.as_secs_f64()
    }

    /// Returns the rates of the slowest and the fastest of five parts of the time.
    pub fn range_per_s(&self) -> [f64; 2] {
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

    /// Returns the megabytes of encoded images per second.
    pub fn mb_per_s(&self) -> f64 {
        self.bytes as f64 / 1e6 / self.wall.as_secs_f64()
    }

    /// Returns the stages: reading, then those of the augmenting threads, which begin with waiting
    /// for bytes.
    pub fn stages(&self) -> Vec<LoaderStage> {
        let mut stages = vec![LoaderStage {
            name: "read",
            p50_ms: self.read.read_p50.as_secs_f64() * 1e3,
            p99_ms: self.read.read_p99.as_secs_f64() * 1e3,
            share: self.share(self.read.read, self.n_readers),
        }];
        for stage in self.augment.iter().flat_map(|augment| &augment.stages) {
            stages.push(LoaderStage {
                name: stage.name,
                p50_ms: stage.p50.as_secs_f64() * 1e3,
                p99_ms: stage.p99.as_secs_f64() * 1e3,
                share: self.share(stage.total, self.n_threads),
            });
        }
        stages
    }

    /// Returns `total` as a share of the time of `n_threads` threads.
    fn share(&self, total: Duration, n_threads: usize) -> f64 {
        total.as_secs_f64() / (self.wall.as_secs_f64() * n_threads as f64)
    }

    /// Returns rates, stages and queues as JSON.
    pub fn to_json(&self) -> Value {
        let mut stages = Map::new();
        for stage in self.stages() {
            stages.insert(stage.name.replace(' ', "_"), json!(stage));
        }
        json!({
            "workers": self.n_threads,
            "images_per_s": self.images_per_s(),
            "images_per_s_range": self.range_per_s(),
            "mb_per_s": self.mb_per_s(),
            "stages": stages,
            "queues": self.queues,
        })
    }

    /// Returns what limits the rate.
    pub fn bottleneck(&self) -> Bottleneck {
        let stages = self.stages();
        if self.augment.is_none() {
            return Bottleneck::Consumer { reading: stages[0].share };
        }
        let waiting = stages[1].share;
        if waiting > MAX_WAITING {
            return Bottleneck::Reading { waiting };
        }
        let busiest = stages[2..].iter().max_by(|a, b| a.share.total_cmp(&b.share));
        Bottleneck::Cpu {
            waiting,
            stage: busiest.map_or("nothing", |stage| stage.name),
            share: busiest.map_or(0.0, |stage| stage.share),
        }
    }
}
