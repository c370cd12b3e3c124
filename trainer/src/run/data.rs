//! Connection of `pipeline` and `augment`: turns the samples of a rank's share into batches of
//! views.

use std::path::Path;
use std::sync::Arc;

use augment::{AugmentError, BatchPool, DecodeRules, EncodedImage, PoolConfig, SampleKey, Source, ViewMix};
use kernels::device::workers::n_or_all_cores;
use pipeline::{Cursor, Dataset, Item, Loader, LoaderConfig, Order, PipelineError, Quarantine, Share};

use crate::recipe::plan::Plan;

/// Number of bits of the index of a sample in its address, whose other bits count repeats. A data
/// set has fewer than 2^40 samples, so that each of up to 2^24 repeats of an image in an epoch has
/// an address, and therefore views, of its own.
pub(super) const SAMPLE_BITS: u32 = 40;

/// A [`Source`] that reads shards.
pub struct ShardSource {
    loader: Loader,
    seed: u64,
}

/// A sample with its address.
pub struct ShardImage {
    item: Item,
    seed: u64,
}

impl EncodedImage for ShardImage {
    fn files(&self) -> Vec<&[u8]> {
        self.item.sample.image.files()
    }

    fn mask(&self) -> Option<&[u8]> {
        self.item.sample.mask.as_deref()
    }

    fn batch(&self) -> u64 {
        self.item.batch
    }

    fn slot(&self) -> usize {
        self.item.slot
    }

    fn key(&self) -> SampleKey {
        SampleKey {
            seed: self.seed,
            epoch: self.item.epoch,
            sample: self.item.sample.id.0 ^ (self.item.repeat << SAMPLE_BITS),
            attempt: self.item.attempt,
        }
    }
}

impl Source for ShardSource {
    type Image = ShardImage;
    type Error = PipelineError;

    fn next_image(&self) -> Option<Result<ShardImage, PipelineError>> {
        let item = self.loader.next_item()?;
        Some(item.map(|item| ShardImage { item, seed: self.seed }))
    }

    fn substitute(&self, image: ShardImage, why: &AugmentError) -> Result<ShardImage, PipelineError> {
        let item = self.loader.substitute(image.item, &why.to_string())?;
        Ok(ShardImage { item, seed: self.seed })
    }

    fn finish_batch(&self, batch: u64) {
        self.loader.finish_batch(batch);
    }

    fn close(&self) {
        self.loader.close();
    }
}

impl ShardSource {
    /// Returns the loader whose threads read the shards.
    pub fn loader(&self) -> &Loader {
        &self.loader
    }
}

/// Configuration of a stream of batches.
#[derive(Debug, Clone)]
pub struct StreamConfig {
    /// The views of each batch.
    pub views: ViewMix,
    /// Seed of the order and of the views.
    pub seed: u64,
    /// Number of shards whose samples are shuffled together.
    pub window_shards: usize,
    /// Number of threads that decode and augment.
    pub n_threads: usize,
    /// Rules for decoding an image.
    pub rules: DecodeRules,
    /// Number of classes of pixels, if views have masks: then samples are read with their masks.
    pub n_pixel_classes: Option<usize>,
    /// Threads and memory of the loader.
    pub loader: LoaderConfig,
}

/// Starts the stream of batches of `plan`'s run from `cursor` on, for one rank. Bad samples are
/// recorded in `ledger`.
///
/// # Errors
/// [`PipelineError`] if the ledger cannot be read, or the cache is too small for the windows.
pub fn batches(
    dataset: Arc<Dataset>,
    plan: &Plan,
    share: Share,
    cursor: Cursor,
    ledger: &Path,
) -> Result<BatchPool<ShardSource>, PipelineError> {
    let data = &plan.recipe.data;
    let config = StreamConfig {
        views: plan.view_mix(),
        seed: plan.recipe.seed,
        window_shards: data.window_shards,
        n_threads: n_or_all_cores(plan.n_data_threads),
        rules: data.rules(),
        n_pixel_classes: plan.recipe.method.pixel_classes().map(<[String]>::len),
        loader: LoaderConfig::default(),
    };
    dataset.check_cache(data.window_shards)?;
    let quarantine = Quarantine::open(ledger, data.max_bad_rate)?;
    Ok(stream(dataset, config, share, cursor, Arc::new(quarantine)))
}

/// Starts a stream of batches from `cursor` on, for one rank.
pub fn stream(
    dataset: Arc<Dataset>,
    config: StreamConfig,
    share: Share,
    cursor: Cursor,
    quarantine: Arc<Quarantine>,
) -> BatchPool<ShardSource> {
    let order = Order::for_dataset(&dataset, config.seed, config.window_shards);
    let reads_masks = config.n_pixel_classes.is_some();
    let loader_config = LoaderConfig { reads_masks, ..config.loader };
    let loader = Loader::start(dataset, order, share, cursor, quarantine, loader_config);
    let pool = PoolConfig {
        n_threads: config.n_threads,
        batch_len: share.len(),
        first_batch: cursor.0,
        rules: config.rules,
        n_pixel_classes: config.n_pixel_classes,
    };
    let source = Arc::new(ShardSource { loader, seed: config.seed });
    BatchPool::start(source, config.views, pool)
}
