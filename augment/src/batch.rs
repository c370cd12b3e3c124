//! Decoding and augmentation on N threads. Batches are returned in order, whichever thread finishes
//! first.
//!
//! One thread processes a sample from its encoded bytes to its finished views, so that a decoded
//! image stays in that core's cache.
//!
//! Views are stored by image ([`Batch::samples`]), not by view, so that the images that one thread
//! converts are one range. Each sample keeps its own buffers: views are never copied into one
//! buffer for the whole batch.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, unbounded};

use crate::decode::Decoder;
use crate::stats::{Stage, StageStats, StageTimes};
use crate::{AugmentError, DecodeRules, Image, Mask, SampleKey, ViewMaker, ViewMix, Views};

/// Interval at which a thread that waits for a batch checks whether it should stop.
const STOP_POLL: Duration = Duration::from_millis(100);

/// An encoded image with its slot in a batch.
pub trait EncodedImage: Send + 'static {
    /// Returns the encoded files: one, or those of the channels of an image that is not RGB.
    fn files(&self) -> Vec<&[u8]>;
    /// Returns the encoded mask of the image, if it was read with one.
    fn mask(&self) -> Option<&[u8]> {
        None
    }
    /// Returns the index of the global batch.
    fn batch(&self) -> u64;
    /// Returns the slot in the batch.
    fn slot(&self) -> usize;
    /// Returns the address of the image's random choices.
    fn key(&self) -> SampleKey;
}

/// Classes of an image with their shares: 1 of each class that it has, and less where images are
/// mixed. Empty for an image without a class.
pub type SoftLabel = Vec<(u32, f32)>;

/// Source of encoded images. Called by many threads at once.
pub trait Source: Send + Sync + 'static {
    /// Type of the images.
    type Image: EncodedImage;
    /// Error that ends the source.
    type Error: std::error::Error + Send + 'static;

    /// Returns the next image, roughly in the order of batches; blocks. Returns `None` at the end.
    fn next_image(&self) -> Option<Result<Self::Image, Self::Error>>;

    /// Returns a substitute for an image that cannot be used.
    ///
    /// # Errors
    /// Fails if too many images were bad.
    fn substitute(&self, image: Self::Image, why: &AugmentError) -> Result<Self::Image, Self::Error>;

    /// Notifies the source that the pool has returned `batch`.
    fn finish_batch(&self, batch: u64);

    /// Closes the source, so that [`Source::next_image`] returns `None`.
    fn close(&self);
}

/// Views of the samples of one step, by slot.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Index of the global batch.
    pub index: u64,
    /// The views of each sample.
    pub samples: Vec<Views>,
    /// The label of each sample; empty unless the batch is for a method that learns from labels,
    /// for which its caller sets them.
    pub labels: Vec<SoftLabel>,
    /// Addresses of the samples, as in [`SampleKey::sample`].
    pub sample_ids: Vec<u64>,
}

/// Settings of a pool.
#[derive(Debug, Clone, Copy)]
pub struct PoolConfig {
    /// Number of threads that decode and augment.
    pub n_threads: usize,
    /// Number of samples of a batch.
    pub batch_len: usize,
    /// Index of the first batch.
    pub first_batch: u64,
    /// Limits and options of the decoder.
    pub rules: DecodeRules,
    /// Number of classes of pixels, if views have masks: an image whose mask is missing or does not
    /// fit is replaced by another.
    pub n_pixel_classes: Option<usize>,
}

/// A pool that turns a [`Source`] into ordered batches.
pub struct BatchPool<S: Source> {
    source: Arc<S>,
    finished: Receiver<Result<Finished, S::Error>>,
    open: BTreeMap<u64, PartialBatch>,
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
    views: Views,
}

struct PartialBatch {
    batch: Batch,
    missing: usize,
}

impl<S: Source> BatchPool<S> {
    /// Starts the threads.
    pub fn start(source: Arc<S>, views: impl Into<ViewMix>, config: PoolConfig) -> Self {
        // Unbounded, because the source bounds it: it opens a limited number of batches.
        let (sender, finished) = unbounded();
        let mix = Arc::new(views.into());
        let stats = Arc::new(StageStats::default());
        let (spare, spares) = unbounded();
        let n_threads = config.n_threads.max(1);
        let mut threads = Vec::with_capacity(n_threads);
        for _ in 0..n_threads {
            let worker = Worker {
                source: Arc::clone(&source),
                mix: Arc::clone(&mix),
                rules: config.rules,
                n_pixel_classes: config.n_pixel_classes,
                stats: Arc::clone(&stats),
                maker: ViewMaker::default(),
                decoder: Decoder::default(),
                decoded: Image::default(),
                spares: spares.clone(),
            };
            let sender = sender.clone();
            threads.push(std::thread::spawn(move || worker.run(&sender)));
        }
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

    /// Returns the next batch; blocks. Returns `None` once the source has ended.
    ///
    /// # Errors
    /// Returns the error of the source, once; the pool ends with it.
    pub fn next_batch(&mut self) -> Option<Result<Batch, S::Error>> {
        self.next_batch_unless(&AtomicBool::new(false))
    }

    /// Returns the next batch like [`BatchPool::next_batch`], but `None` soon after `stop` is set.
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
                Ok(Ok(finished)) => self.insert(finished),
                Ok(Err(error)) => {
                    self.source.close();
                    return Some(Err(error));
                }
                Err(RecvTimeoutError::Timeout) if !stop.load(Ordering::Relaxed) => {}
                Err(_) => return None,
            }
        }
    }

    /// Reuses the memory of a batch that is no longer needed, so that the next views allocate none.
    pub fn recycle(&self, batch: Batch) {
        for views in batch.samples {
            // Fails if all threads have ended: then the memory is not needed.
            let _ = self.spare.send(views);
        }
    }

    /// Returns the times by stage.
    pub fn stats(&self) -> &StageStats {
        &self.stats
    }

    /// Returns the number of finished images that wait for the rest of their batch or for the
    /// caller.
    pub fn n_waiting(&self) -> usize {
        let n_inserted: usize = self.open.values().map(|open| self.batch_len - open.missing).sum();
        n_inserted + self.finished.len()
    }

    /// Returns the source, for its statistics.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// Inserts the views of a sample into their slot of their batch.
    fn insert(&mut self, finished: Finished) {
        let n = self.batch_len;
        let open = self.open.entry(finished.batch).or_insert_with(|| PartialBatch {
            batch: Batch {
                index: finished.batch,
                samples: vec![Views::default(); n],
                labels: Vec::new(),
                sample_ids: vec![0; n],
            },
            missing: n,
        });
        open.batch.samples[finished.slot] = finished.views;
        open.batch.sample_ids[finished.slot] = finished.sample;
        open.missing -= 1;
    }
}

impl<S: Source> Drop for BatchPool<S> {
    fn drop(&mut self) {
        self.source.close();
        for thread in self.threads.drain(..) {
            // A worker that panicked has already dropped its sender, so that no error is left to
            // handle.
            let _ = thread.join();
        }
    }
}

/// State of one thread, with the memory that it reuses for every image.
struct Worker<S: Source> {
    source: Arc<S>,
    mix: Arc<ViewMix>,
    rules: DecodeRules,
    n_pixel_classes: Option<usize>,
    stats: Arc<StageStats>,
    maker: ViewMaker,
    decoder: Decoder,
    decoded: Image,
    spares: Receiver<Views>,
}

impl<S: Source> Worker<S> {
    fn run(mut self, sender: &Sender<Result<Finished, S::Error>>) {
        loop {
            let start = Instant::now();
            let Some(image) = self.source.next_image() else { return };
            let mut times = StageTimes::default();
            times.add(Stage::Wait, start.elapsed());
            let finished = image.and_then(|image| self.process(image, times));
            let failed = finished.is_err();
            if sender.send(finished).is_err() || failed {
                return;
            }
        }
    }

    /// Turns an image, or the first usable substitute for it, into views.
    fn process(&mut self, mut image: S::Image, mut times: StageTimes) -> Result<Finished, S::Error> {
        let mut views = self.spares.try_recv().unwrap_or_default();
        loop {
            match self.make_views(&image, &mut views, &mut times) {
                Ok(()) => {
                    self.stats.record(&times, image.files().iter().map(|file| file.len()).sum());
                    return Ok(Finished {
                        batch: image.batch(),
                        slot: image.slot(),
                        sample: image.key().sample,
                        views,
                    });
                }
                Err(why) => image = self.source.substitute(image, &why)?,
            }
        }
    }

    /// Decodes `image` and its mask, if views have masks, and writes its views to `out`.
    fn make_views(
        &mut self,
        image: &S::Image,
        out: &mut Views,
        times: &mut StageTimes,
    ) -> Result<(), AugmentError> {
        // A panic in a decoder is treated as one bad sample. Without this the thread would end, its
        // slot would never be filled, and the run would wait forever. The contents of the scratch
        // memory do not matter afterwards: every image overwrites them.
        catch_unwind(AssertUnwindSafe(|| {
            let start = Instant::now();
            let result = self.decoded.decode_into(&image.files(), &self.rules, &mut self.decoder);
            times.add(Stage::Decode, start.elapsed());
            result?;
            let multicrop = self.mix.multicrop(image.key().seed, image.batch());
            if let Some(n_classes) = self.n_pixel_classes {
                let start = Instant::now();
                let mask = decode_mask(image.mask(), self.decoded.size_px(), n_classes)?;
                times.add(Stage::Decode, start.elapsed());
                let start = Instant::now();
                mask.views_into(multicrop, image.key(), &mut out.masks);
                times.add(Stage::Resize, start.elapsed());
            }
            self.maker.make_into(&self.decoded, multicrop, image.key(), out, times)
        }))
        .unwrap_or_else(|_| Err(AugmentError::Decode("the decoder panicked".into())))
    }
}

/// Decodes the mask `bytes` of an image of `image_px`, whose pixels are of `n_classes`.
///
/// # Errors
/// [`AugmentError::Mask`].
fn decode_mask(bytes: Option<&[u8]>, image_px: [u32; 2], n_classes: usize) -> Result<Mask, AugmentError> {
    let Some(bytes) = bytes else { return Err(AugmentError::Mask("there is none".into())) };
    let mask = Mask::decode_for(bytes, image_px).map_err(AugmentError::Mask)?;
    mask.check_classes(n_classes).map_err(AugmentError::Mask)?;
    Ok(mask)
}
