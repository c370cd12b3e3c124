//! Decode and augment on N threads; batches leave in order whatever thread finished first.
//!
//! One thread owns one sample from its encoded bytes to its finished views, so that a decoded
//! image never leaves that core's cache.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, unbounded};

use crate::decode::Decoder;
use crate::stats::{Stage, StageStats, StageTimes};
use crate::{AugmentError, DecodeRules, MultiCrop, Rgb8, SampleKey, ViewMaker, Views};

/// How often whoever waits for a batch looks whether it is still wanted.
const STOP_POLL: Duration = Duration::from_millis(100);

/// An encoded image with its place in a batch.
pub trait EncodedImage: Send + 'static {
    /// The encoded bytes.
    fn bytes(&self) -> &[u8];
    /// Global batch.
    fn batch(&self) -> u64;
    /// Slot in the batch.
    fn slot(&self) -> usize;
    /// Address of its random choices.
    fn key(&self) -> SampleKey;
    /// Its class, if it has one.
    fn label(&self) -> Option<u32>;
}

/// Where encoded images come from. Called by many threads at once.
pub trait Source: Send + Sync + 'static {
    /// What it yields.
    type Image: EncodedImage;
    /// Why it stops.
    type Error: std::error::Error + Send + 'static;

    /// The next image, about in order of batches; blocks. `None` at the end.
    fn next_image(&self) -> Option<Result<Self::Image, Self::Error>>;

    /// An image to stand in for one that cannot be used.
    ///
    /// # Errors
    /// When too many were bad.
    fn substitute(&self, image: Self::Image, why: &AugmentError) -> Result<Self::Image, Self::Error>;

    /// Called when `batch` leaves the pool.
    fn finish_batch(&self, batch: u64);

    /// Asks it to end, so that [`Source::next_image`] returns `None`.
    fn close(&self);
}

/// Views of the samples of one step, by slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Number of the global batch.
    pub index: u64,
    /// The views of each sample.
    pub samples: Vec<Views>,
    /// The class of each sample, where known.
    pub labels: Vec<Option<u32>>,
    /// Numbers of the samples in the data set.
    pub sample_ids: Vec<u64>,
}

/// Size of a pool.
#[derive(Debug, Clone, Copy)]
pub struct PoolConfig {
    /// Threads that decode and augment.
    pub n_threads: usize,
    /// Samples of a batch.
    pub batch_len: usize,
    /// Number of the first batch.
    pub first_batch: u64,
    /// What the decoder accepts.
    pub rules: DecodeRules,
}

/// A pool that turns a [`Source`] into ordered batches.
pub struct BatchPool<S: Source> {
    source: Arc<S>,
    finished: Receiver<Result<Finished, S::Error>>,
    open: BTreeMap<u64, OpenBatch>,
    next_batch: u64,
    batch_len: usize,
    stats: Arc<StageStats>,
    spare: Sender<Views>,
    threads: Vec<JoinHandle<()>>,
}

struct Finished {
    batch: u64,
    slot: usize,
    sample: u64,
    label: Option<u32>,
    views: Views,
}

struct OpenBatch {
    batch: Batch,
    missing: usize,
}

impl<S: Source> BatchPool<S> {
    /// Starts the threads.
    pub fn start(source: Arc<S>, multicrop: MultiCrop, config: PoolConfig) -> Self {
        // Unbounded, because the source bounds it: it opens a limited number of batches.
        let (sender, finished) = unbounded();
        let multicrop = Arc::new(multicrop);
        let stats = Arc::new(StageStats::default());
        let (spare, spares) = unbounded();
        let threads = (0..config.n_threads.max(1))
            .map(|_| {
                let worker = Worker {
                    source: Arc::clone(&source),
                    multicrop: Arc::clone(&multicrop),
                    rules: config.rules,
                    stats: Arc::clone(&stats),
                    maker: ViewMaker::default(),
                    decoder: Decoder::default(),
                    decoded: Rgb8::default(),
                    spares: spares.clone(),
                };
                let sender = sender.clone();
                std::thread::spawn(move || worker.run(&sender))
            })
            .collect();
        Self {
            source,
            finished,
            open: BTreeMap::new(),
            next_batch: config.first_batch,
            batch_len: config.batch_len,
            stats,
            spare,
            threads,
        }
    }

    /// The next batch; blocks. `None` once the source has ended.
    ///
    /// # Errors
    /// The source's, once; the pool ends with it.
    pub fn next_batch(&mut self) -> Option<Result<Batch, S::Error>> {
        self.next_batch_unless(&AtomicBool::new(false))
    }

    /// As [`BatchPool::next_batch`], but gives up with `None` soon after `stop` is set.
    ///
    /// # Errors
    /// As [`BatchPool::next_batch`].
    pub fn next_batch_unless(&mut self, stop: &AtomicBool) -> Option<Result<Batch, S::Error>> {
        loop {
            let complete = self.open.get(&self.next_batch).is_some_and(|open| open.missing == 0);
            if complete && let Some(open) = self.open.remove(&self.next_batch) {
                self.source.finish_batch(self.next_batch);
                self.next_batch += 1;
                return Some(Ok(open.batch));
            }
            match self.finished.recv_timeout(STOP_POLL) {
                Ok(Ok(finished)) => self.place(finished),
                Ok(Err(error)) => {
                    self.source.close();
                    return Some(Err(error));
                }
                Err(RecvTimeoutError::Timeout) if !stop.load(Ordering::Relaxed) => {}
                Err(_) => return None,
            }
        }
    }

    /// Takes back the memory of a batch that is done with, so that the next views need none.
    pub fn recycle(&self, batch: Batch) {
        for views in batch.samples {
            // Without threads there is nobody left to use it.
            let _ = self.spare.send(views);
        }
    }

    /// Times by stage.
    pub fn stats(&self) -> &StageStats {
        &self.stats
    }

    /// Images that are finished and wait for the others of their batch, or for a taker.
    pub fn n_waiting(&self) -> usize {
        let placed: usize = self.open.values().map(|open| self.batch_len - open.missing).sum();
        placed + self.finished.len()
    }

    /// The source, for its statistics.
    pub fn source(&self) -> &S {
        &self.source
    }

    fn place(&mut self, finished: Finished) {
        let n = self.batch_len;
        let open = self.open.entry(finished.batch).or_insert_with(|| OpenBatch {
            batch: Batch {
                index: finished.batch,
                samples: vec![Views::default(); n],
                labels: vec![None; n],
                sample_ids: vec![0; n],
            },
            missing: n,
        });
        open.batch.samples[finished.slot] = finished.views;
        open.batch.labels[finished.slot] = finished.label;
        open.batch.sample_ids[finished.slot] = finished.sample;
        open.missing -= 1;
    }
}

impl<S: Source> Drop for BatchPool<S> {
    fn drop(&mut self) {
        self.source.close();
        for thread in self.threads.drain(..) {
            // A worker that panicked has already dropped its sender; nothing is left to do.
            let _ = thread.join();
        }
    }
}

/// One thread's share of the work, with the memory that it uses again for every image.
struct Worker<S: Source> {
    source: Arc<S>,
    multicrop: Arc<MultiCrop>,
    rules: DecodeRules,
    stats: Arc<StageStats>,
    maker: ViewMaker,
    decoder: Decoder,
    decoded: Rgb8,
    spares: Receiver<Views>,
}

impl<S: Source> Worker<S> {
    fn run(mut self, sender: &Sender<Result<Finished, S::Error>>) {
        loop {
            let start = Instant::now();
            let Some(image) = self.source.next_image() else { return };
            let mut times = StageTimes::default();
            times.add(Stage::Wait, start.elapsed());
            let finished = image.and_then(|image| self.finish(image, times));
            let failed = finished.is_err();
            if sender.send(finished).is_err() || failed {
                return;
            }
        }
    }

    /// Turns an image, or the first usable substitute for it, into views.
    fn finish(&mut self, mut image: S::Image, mut times: StageTimes) -> Result<Finished, S::Error> {
        let mut views = self.spares.try_recv().unwrap_or_default();
        loop {
            match self.views(&image, &mut views, &mut times) {
                Ok(()) => {
                    self.stats.record(&times, image.bytes().len());
                    return Ok(Finished {
                        batch: image.batch(),
                        slot: image.slot(),
                        sample: image.key().sample,
                        label: image.label(),
                        views,
                    });
                }
                Err(why) => image = self.source.substitute(image, &why)?,
            }
        }
    }

    fn views(
        &mut self,
        image: &S::Image,
        out: &mut Views,
        times: &mut StageTimes,
    ) -> Result<(), AugmentError> {
        // A panic in a decoder is one bad sample. Without this the thread would be gone, its slot
        // never filled, and the run would wait for ever. What the scratch memory then holds does not
        // matter: every image writes it anew.
        catch_unwind(AssertUnwindSafe(|| {
            let start = Instant::now();
            let decoded = self.decoder.decode_into(image.bytes(), &self.rules, &mut self.decoded);
            times.add(Stage::Decode, start.elapsed());
            decoded?;
            self.maker.make_into(&self.decoded, &self.multicrop, image.key(), out, times)
        }))
        .unwrap_or_else(|_| Err(AugmentError::Decode("the decoder panicked".into())))
    }
}
