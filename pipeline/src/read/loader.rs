//! Reader threads, which read the samples of a rank's share into memory, in the order of positions.
//!
//! Two limits throttle the threads. Bytes: encoded images in flight stay below `max_bytes`, counted
//! from the read to the drop of the [`Item`]. Batches: nothing is read more than `prefetch_batches`
//! ahead of the last batch that [`Loader::finish_batch`] reported, so that the caller, which
//! assembles batches, has a bounded number of them open. Both are applied in the order of
//! positions, so that neither can starve the batch that the caller waits for.
//!
//! When the loader enters a window of shards, it requests those of this window and of the next;
//! `Dataset::check_cache` refuses a cache that cannot hold both.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam::channel::{Receiver, Sender, bounded, select, unbounded};

use super::place::Place;
use super::stats::ReadStats;
use crate::{Cursor, Dataset, Order, PipelineError, Quarantine, Sample, SampleId, Share};

/// Limits and number of threads of a [`Loader`].
#[derive(Debug, Clone, Copy)]
pub struct LoaderConfig {
    /// Number of reader threads.
    pub n_threads: usize,
    /// Maximum number of encoded bytes in flight; a larger sample is read alone.
    pub max_bytes: u64,
    /// Maximum number of global batches that are open at once.
    pub prefetch_batches: u64,
    /// Whether samples are read with their masks.
    pub reads_masks: bool,
}

impl Default for LoaderConfig {
    fn default() -> Self {
        Self { n_threads: 2, max_bytes: 128 << 20, prefetch_batches: 3, reads_masks: false }
    }
}

/// A sample with its slot in a batch.
#[derive(Debug)]
pub struct Item {
    /// Index of the global batch.
    pub batch: u64,
    /// Slot in this rank's part of the batch.
    pub slot: usize,
    /// Index of the pass over the data.
    pub epoch: u64,
    /// Number of times that the sample has been shown before in this epoch: more than 0 only for
    /// samples with a large weight.
    pub repeat: u64,
    /// Zero for the sample that the order names, `k` for its `k`-th substitute.
    pub attempt: u64,
    /// The sample.
    pub sample: Sample,
    /// Permit for the bytes, which count against the limit until the item is dropped.
    _permit: Permit,
}

/// Reads samples ahead on threads until it is dropped.
#[derive(Debug)]
pub struct Loader {
    shared: Arc<Shared>,
    items: Receiver<Result<Item, PipelineError>>,
    /// Disconnected when the loader is closed, even if a thread still waits for a server.
    open: Receiver<()>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    dataset: Arc<Dataset>,
    order: Order,
    share: Share,
    quarantine: Arc<Quarantine>,
    max_bytes: u64,
    prefetch_batches: u64,
    reads_masks: bool,
    stats: ReadStats,
    gate: Mutex<Gate>,
    changed: Condvar,
    /// Sender that is dropped to close the loader.
    opened: Mutex<Option<Sender<()>>>,
}

#[derive(Debug)]
struct Gate {
    batch: u64,
    slot: usize,
    /// First batch that may not be read yet.
    batch_limit: u64,
    bytes_in_flight: u64,
    /// First position after the current window; reaching it starts the next prefetch.
    window_end: u64,
    /// Set when reading has stopped, because a read failed or the loader was closed.
    closed: bool,
    /// Set when the loader was closed, so that items already read are discarded.
    discards_items: bool,
}

/// Bytes of one item, released when it is dropped.
#[derive(Debug)]
struct Permit {
    shared: Arc<Shared>,
    bytes: u64,
}

impl Loader {
    /// Starts reading at `cursor`.
    pub fn start(
        dataset: Arc<Dataset>,
        order: Order,
        share: Share,
        cursor: Cursor,
        quarantine: Arc<Quarantine>,
        config: LoaderConfig,
    ) -> Self {
        let prefetch_batches = config.prefetch_batches.max(1);
        let gate = Gate {
            batch: cursor.0,
            slot: 0,
            batch_limit: cursor.0 + prefetch_batches,
            bytes_in_flight: 0,
            window_end: 0,
            closed: false,
            discards_items: false,
        };
        let (opened, open) = bounded(0);
        let shared = Arc::new(Shared {
            dataset,
            order,
            share,
            quarantine,
            max_bytes: config.max_bytes,
            prefetch_batches,
            reads_masks: config.reads_masks,
            stats: ReadStats::default(),
            gate: Mutex::new(gate),
            changed: Condvar::new(),
            opened: Mutex::new(Some(opened)),
        });
        // Unbounded, because the gate bounds it: an item in the channel holds its permit.
        let (sender, items) = unbounded();
        let threads = (0..config.n_threads.max(1))
            .map(|_| {
                let shared = Arc::clone(&shared);
                let sender = sender.clone();
                std::thread::spawn(move || read_loop(&shared, &sender))
            })
            .collect();
        Self { shared, items, open, threads }
    }

    /// Returns the next item, roughly in the order of positions; blocks. Returns `None` once the
    /// loader is closed.
    ///
    /// Any number of threads may call this.
    pub fn next_item(&self) -> Option<Result<Item, PipelineError>> {
        let item = select! {
            recv(self.items) -> item => item.ok()?,
            recv(self.open) -> _ => return None,
        };
        // After a close, items already read are discarded, not decoded. The lock is released
        // first: an item that is dropped takes it to release its bytes.
        let discards_items = self.shared.lock().discards_items;
        if discards_items { None } else { Some(item) }
    }

    /// Reports that `item` cannot be used and reads its substitute: the next sample of the
    /// permutation that is not known to be bad.
    ///
    /// # Errors
    /// [`PipelineError::TooManyBad`], [`PipelineError::AllBad`], or an error of the ledger.
    pub fn substitute(&self, item: Item, reason: &str) -> Result<Item, PipelineError> {
        self.shared.quarantine.report(&self.shared.dataset, item.sample.id, reason)?;
        let batch = item.batch;
        let slot = item.slot;
        let next = item.attempt + 1;
        drop(item);
        fetch(&self.shared, batch, slot, next, None)
    }

    /// Reports that `batch` is complete: one more batch may be read ahead.
    pub fn finish_batch(&self, batch: u64) {
        let mut gate = self.shared.lock();
        gate.batch_limit = gate.batch_limit.max(batch + 1 + self.shared.prefetch_batches);
        drop(gate);
        self.shared.changed.notify_all();
    }

    /// Returns the number of items that were read and not taken yet.
    pub fn queue_len(&self) -> usize {
        self.items.len()
    }

    /// Returns the fraction of the byte limit that is in use.
    pub fn fill(&self) -> f64 {
        self.shared.lock().bytes_in_flight as f64 / self.shared.max_bytes as f64
    }

    /// Returns the statistics of the reader threads.
    pub fn stats(&self) -> &ReadStats {
        &self.shared.stats
    }

    /// Stops the reader threads; no further item can be taken.
    pub fn close(&self) {
        let mut gate = self.shared.lock();
        gate.closed = true;
        gate.discards_items = true;
        drop(gate);
        self.shared.changed.notify_all();
        self.shared.opened.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.close();
        // A thread that waits for a server ends when the server answers or the retries are
        // exhausted. Nothing depends on it, so that it is not joined.
        if !self.shared.dataset.is_local() {
            return;
        }
        for thread in self.threads.drain(..) {
            // A reader that panicked has already dropped its sender; there is nothing left to
            // handle.
            let _ = thread.join();
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.shared.lock().bytes_in_flight -= self.bytes;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Gate> {
        // The gate holds plain numbers that stay valid if a holder panics.
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, batch: u64, slot: usize, attempt: u64) -> (Place, SampleId) {
        let place = self.order.place(self.share.position(batch, slot), attempt);
        (place, self.dataset.id(place.shard, place.sample))
    }

    /// Returns the number of bytes that reading a sample brings into memory.
    fn sample_bytes(&self, id: SampleId) -> u64 {
        let image_bytes = self.dataset.sample_bytes(id);
        if self.reads_masks { image_bytes + self.dataset.mask_bytes(id).unwrap_or(0) } else { image_bytes }
    }

    /// Reads a sample, with its mask if masks are read.
    fn read(&self, id: SampleId) -> Result<Sample, PipelineError> {
        if self.reads_masks { self.dataset.read_with_mask(id) } else { self.dataset.read(id) }
    }
}

fn read_loop(shared: &Arc<Shared>, sender: &Sender<Result<Item, PipelineError>>) {
    while let Some((batch, slot, permit)) = claim_next_slot(shared) {
        shared.quarantine.count_seen();
        let result = fetch(shared, batch, slot, 0, Some(permit));
        let failed = result.is_err();
        if sender.send(result).is_err() {
            return;
        }
        if failed {
            shared.lock().closed = true;
            shared.changed.notify_all();
            return;
        }
    }
}

/// Waits until the next slot may be read, and takes a permit for its bytes. `None` once closed.
fn claim_next_slot(shared: &Arc<Shared>) -> Option<(u64, usize, Permit)> {
    let start = Instant::now();
    let mut gate = shared.lock();
    loop {
        if gate.closed {
            return None;
        }
        if gate.batch < gate.batch_limit {
            let bytes = shared.sample_bytes(shared.place(gate.batch, gate.slot, 0).1);
            if gate.bytes_in_flight == 0 || gate.bytes_in_flight + bytes <= shared.max_bytes {
                let batch = gate.batch;
                let slot = gate.slot;
                let position = shared.share.position(batch, slot);
                if position >= gate.window_end {
                    let ahead = shared.order.ahead(position);
                    gate.window_end = ahead.end;
                    shared.dataset.prefetch(&ahead.shards);
                }
                gate.slot += 1;
                if gate.slot == shared.share.len() {
                    gate.batch += 1;
                    gate.slot = 0;
                }
                gate.bytes_in_flight += bytes;
                drop(gate);
                shared.stats.add_wait(start);
                return Some((batch, slot, Permit { shared: Arc::clone(shared), bytes }));
            }
        }
        gate = shared.changed.wait(gate).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Reads the sample of a slot, skipping bad ones, from `first_attempt` on.
fn fetch(
    shared: &Arc<Shared>,
    batch: u64,
    slot: usize,
    first_attempt: u64,
    permit: Option<Permit>,
) -> Result<Item, PipelineError> {
    let n_samples = shared.dataset.n_samples();
    for attempt in first_attempt..first_attempt + n_samples {
        let (place, id) = shared.place(batch, slot, attempt);
        if shared.quarantine.is_bad(id) {
            continue;
        }
        let start = Instant::now();
        match shared.read(id) {
            Ok(sample) => {
                shared.stats.add_read(start, sample.len_bytes());
                // A substitute does not wait for room: it replaces a dropped sample, so that at
                // most one sample per thread exceeds the limit.
                let permit = permit.unwrap_or_else(|| {
                    let bytes = sample.len_bytes();
                    shared.lock().bytes_in_flight += bytes;
                    Permit { shared: Arc::clone(shared), bytes }
                });
                return Ok(Item {
                    batch,
                    slot,
                    epoch: place.epoch,
                    repeat: place.repeat,
                    attempt,
                    sample,
                    _permit: permit,
                });
            }
            Err(error) if error.is_sample_error() => {
                shared.quarantine.report(&shared.dataset, id, &error.to_string())?;
            }
            // A shard that cannot be fetched does not make its samples bad.
            Err(error) => return Err(error),
        }
    }
    Err(shared.quarantine.all_bad(n_samples))
}
