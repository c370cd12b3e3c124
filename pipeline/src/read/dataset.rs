//! A list of shards with their indices: the samples, and their bytes on demand.

use std::sync::atomic::{AtomicUsize, Ordering};

use xxhash_rust::xxh3::Xxh3;

use super::sampling::Sampling;
use crate::shard::image::{EncodedImage, image_members};
use crate::shard::{IMAGE_EXTENSIONS, MASK_EXTENSIONS, Shard};
use crate::{PipelineError, Storage};

/// Largest number of images by whose bytes a data set is recognized.
const MAX_SAMPLED_IMAGES: u64 = 64;

/// Largest number of bytes of images that are read to recognize a data set, unless four images are
/// larger.
const MAX_SAMPLED_BYTES: u64 = 64 << 20;

/// A data set that is open for reading. Shared by threads.
pub struct Dataset {
    shards: Vec<Shard>,
    /// Number of samples before each shard, in the order of the list.
    starts: Vec<u64>,
    n_samples: u64,
    sampling: Sampling,
}

/// Index of a sample in its data set, in the order of the shard list. It identifies the sample
/// permanently: seeds of crops and rows of feature files are keyed by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SampleId(pub u64);

/// One sample's image, still encoded, its label, and its mask if it was read with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// Index of the sample.
    pub id: SampleId,
    /// Key of the sample in its shard.
    pub key: String,
    /// The encoded image.
    pub image: EncodedImage,
    /// The class, if the sample has one.
    pub label: Option<u32>,
    /// The encoded mask; `None` unless it was read with [`Dataset::read_with_mask`] and the sample
    /// has one.
    pub mask: Option<Vec<u8>>,
}

impl Sample {
    /// Returns the number of bytes of the image and the mask.
    pub fn len_bytes(&self) -> u64 {
        (self.image.len() + self.mask.as_ref().map_or(0, Vec::len)) as u64
    }
}

impl Dataset {
    /// Opens the shards that `specs` names (see [`crate::url::expand`]).
    ///
    /// # Errors
    /// Errors of the list, of a shard or of an index; [`PipelineError::Empty`] if no shard holds an
    /// image.
    pub fn open(specs: &[String], storage: &Storage) -> Result<Self, PipelineError> {
        Self::new(storage.open_all(&storage.sources(specs)?)?)
    }

    /// Creates a data set of the samples of `shards`, in their order.
    ///
    /// # Errors
    /// [`PipelineError::Empty`].
    pub fn new(shards: Vec<Shard>) -> Result<Self, PipelineError> {
        let mut starts = Vec::with_capacity(shards.len());
        let mut n_samples = 0;
        for shard in &shards {
            starts.push(n_samples);
            n_samples += shard.len() as u64;
        }
        let dataset = Self { shards, starts, n_samples, sampling: Sampling::default() };
        let any_image =
            dataset.shards.iter().any(|shard| (0..shard.len()).any(|i| shard.image_bytes(i).is_some()));
        if !any_image {
            return Err(PipelineError::Empty {
                n_shards: dataset.shards.len(),
                wanted: IMAGE_EXTENSIONS.join(", "),
                first: dataset.shards.first().map(Shard::name).unwrap_or_default(),
            });
        }
        Ok(dataset)
    }

    /// Sets how often samples are shown.
    ///
    /// # Errors
    /// [`PipelineError::Sampling`] if sources have other shards than the data set, weights are not
    /// one for each sample, or no sample of a source can be shown.
    pub fn sampled(mut self, sampling: Sampling) -> Result<Self, PipelineError> {
        let n_shards: usize = sampling.sources.iter().map(|source| source.n_shards).sum();
        if !sampling.sources.is_empty() && n_shards != self.shards.len() {
            let reason =
                format!("the sources have {n_shards} shards, but the data set has {}", self.shards.len());
            return Err(PipelineError::Sampling { reason });
        }
        for source in &sampling.sources {
            let is_valid = source.share > 0.0 && source.share.is_finite();
            if !is_valid {
                let reason = format!("the share of {} is {}, but must be above 0", source.name, source.share);
                return Err(PipelineError::Sampling { reason });
            }
        }
        if let Some(weights) = &sampling.weights {
            if weights.len() as u64 != self.n_samples {
                let reason = format!("{} weights for {} samples", weights.len(), self.n_samples);
                return Err(PipelineError::Sampling { reason });
            }
            if let Some(weight) = weights.iter().find(|weight| !(weight.is_finite() && **weight >= 0.0)) {
                let reason = format!("a weight is {weight}, but must be 0 or above");
                return Err(PipelineError::Sampling { reason });
            }
        }
        let mut first_shard = 0;
        let sources: Vec<(&str, usize)> = match sampling.sources.as_slice() {
            [] => vec![("the data set", self.shards.len())],
            sources => sources.iter().map(|source| (source.name.as_str(), source.n_shards)).collect(),
        };
        for (name, n_shards) in sources {
            let start = self.starts.get(first_shard).copied().unwrap_or(self.n_samples) as usize;
            let end = self.starts.get(first_shard + n_shards).copied().unwrap_or(self.n_samples) as usize;
            let is_shown = match &sampling.weights {
                Some(weights) => weights[start..end].iter().any(|weight| *weight > 0.0),
                None => end > start,
            };
            if !is_shown {
                let reason = format!("no sample of {name} would ever be drawn");
                return Err(PipelineError::Sampling { reason });
            }
            first_shard += n_shards;
        }
        self.sampling = sampling;
        Ok(self)
    }

    /// Returns how often samples are shown.
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// Returns the number of samples in all shards, usable or not.
    pub fn n_samples(&self) -> u64 {
        self.n_samples
    }

    /// Returns the number of samples of each shard, in the order of the list.
    pub fn shard_sizes(&self) -> Vec<u64> {
        self.shards.iter().map(|shard| shard.len() as u64).collect()
    }

    /// Starts fetching the shards with these indices in the background, in this order, except those
    /// that are read in place.
    pub fn prefetch(&self, shards: &[usize]) {
        for shard in shards {
            self.shards[*shard].prefetch();
        }
    }

    /// Returns whether all shards are read in place.
    pub fn is_local(&self) -> bool {
        self.shards.iter().all(|shard| shard.cache_use().is_none())
    }

    /// Checks that the cache can hold any two windows of shards: the one being read and the one
    /// being fetched.
    ///
    /// # Errors
    /// [`PipelineError::CacheTooSmall`].
    pub fn check_cache(&self, window_shards: usize) -> Result<(), PipelineError> {
        let mut uses: Vec<_> = self.shards.iter().filter_map(Shard::cache_use).collect();
        uses.sort_unstable_by_key(|cached| std::cmp::Reverse(cached.len_bytes));
        // Each source of a mix has its own windows, and may pass from one to the next within a
        // block of positions.
        let n_windows = match self.sampling.sources.len() {
            0 => 2,
            n_sources => 3 * n_sources,
        };
        let windows = uses.iter().take(window_shards.max(1).saturating_mul(n_windows));
        let needed_bytes = windows.fold(0u64, |sum, cached| sum.saturating_add(cached.len_bytes));
        match uses.first() {
            Some(cached) if cached.max_bytes < needed_bytes => {
                Err(PipelineError::CacheTooSmall { needed_bytes, max_bytes: cached.max_bytes })
            }
            _ => Ok(()),
        }
    }

    /// Returns the index of the sample at (`shard`, `sample`).
    pub fn id(&self, shard: usize, sample: u64) -> SampleId {
        SampleId(self.starts[shard] + sample)
    }

    /// Returns the name of the shard that holds sample `id`, the sample's key, and its offset in
    /// the shard in bytes.
    pub fn describe(&self, id: SampleId) -> (String, String, u64) {
        let (shard, i) = self.locate(id);
        (shard.name(), shard.key(i).to_string(), shard.offset_bytes(i))
    }

    /// Returns the number of bytes that reading sample `id` brings into memory.
    pub fn sample_bytes(&self, id: SampleId) -> u64 {
        let (shard, i) = self.locate(id);
        shard.image_bytes(i).unwrap_or(0)
    }

    /// Returns the number of bytes of the encoded mask of sample `id`, if it has one.
    pub fn mask_bytes(&self, id: SampleId) -> Option<u64> {
        let (shard, i) = self.locate(id);
        shard.mask_bytes(i)
    }

    /// Reads sample `id`.
    ///
    /// # Errors
    /// [`PipelineError::MissingField`] when it holds no image, [`PipelineError::Io`] when the
    /// shard cannot be read.
    pub fn read(&self, id: SampleId) -> Result<Sample, PipelineError> {
        let (shard, i) = self.locate(id);
        let image = shard.image(i)?;
        Ok(Sample { id, key: shard.key(i).to_string(), image, label: shard.label(i)?, mask: None })
    }

    /// Reads sample `id` as [`Dataset::read`] does, with its mask if it has one.
    ///
    /// # Errors
    /// As [`Dataset::read`].
    pub fn read_with_mask(&self, id: SampleId) -> Result<Sample, PipelineError> {
        let sample = self.read(id)?;
        Ok(Sample { mask: self.member(id, &MASK_EXTENSIONS)?, ..sample })
    }

    /// Returns the class of sample `id`, without its image.
    ///
    /// # Errors
    /// [`PipelineError::Io`] when the shard cannot be read.
    pub fn label(&self, id: SampleId) -> Result<Option<u32>, PipelineError> {
        let (shard, i) = self.locate(id);
        shard.label(i)
    }

    /// Returns the classes of sample `id`, numbers or names: none, one or several.
    ///
    /// # Errors
    /// [`PipelineError::Io`] when the shard cannot be read.
    pub fn classes(&self, id: SampleId) -> Result<Vec<String>, PipelineError> {
        let (shard, i) = self.locate(id);
        shard.classes(i)
    }

    /// Returns whether sample `id` states that it is of no class, which an empty list does.
    ///
    /// # Errors
    /// [`PipelineError::Io`] when the shard cannot be read.
    pub fn states_no_class(&self, id: SampleId) -> Result<bool, PipelineError> {
        let (shard, i) = self.locate(id);
        shard.states_no_class(i)
    }

    /// Returns the member of sample `id` with the first of `extensions` that the sample has.
    ///
    /// # Errors
    /// [`PipelineError::Io`] when the shard cannot be read.
    pub fn member(&self, id: SampleId, extensions: &[&str]) -> Result<Option<Vec<u8>>, PipelineError> {
        let (shard, i) = self.locate(id);
        shard.member(i, extensions)
    }

    /// Returns the length of the encoded image of sample `id` in bytes, if it has one, and the
    /// short check of its bytes, if known: images that differ in either are different.
    pub fn image_check(&self, id: SampleId) -> Option<(u64, Option<u16>)> {
        let (shard, i) = self.locate(id);
        let members = image_members(shard.index(), i);
        let len_bytes = members.iter().map(|member| member.len_bytes).sum();
        // A band that moves to the place of another one is another image.
        let check = members
            .iter()
            .map(|member| member.check)
            .try_fold(0, |check: u16, next| Some(check.rotate_left(1) ^ next?));
        (!members.is_empty()).then_some((len_bytes, check))
    }

    /// Returns a hash that identifies the samples by [`Shard::fingerprint`], in their order. Shards
    /// whose hash is not known yet are read, several at a time.
    ///
    /// # Errors
    /// Errors of [`Shard::fingerprint`].
    pub fn fingerprint(&self) -> Result<u64, PipelineError> {
        let next = AtomicUsize::new(0);
        let n_threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(self.shards.len());
        std::thread::scope(|scope| {
            for _ in 0..n_threads {
                scope.spawn(|| {
                    while let Some(shard) = self.shards.get(next.fetch_add(1, Ordering::Relaxed)) {
                        // The shard keeps the result; an error occurs again below.
                        let _ = shard.fingerprint();
                    }
                });
            }
        });
        let mut hash = Xxh3::new();
        for shard in &self.shards {
            hash.update(&shard.fingerprint()?.to_le_bytes());
        }
        Ok(hash.digest())
    }

    /// Returns a hash of the keys of the samples and the lengths of their images, in order, and of
    /// how often they are shown: equal for the same shards, wherever they are, with or without a
    /// sidecar.
    pub fn samples_fingerprint(&self) -> u64 {
        let mut hash = Xxh3::new();
        for shard in &self.shards {
            hash.update(&(shard.len() as u64).to_le_bytes());
            for i in 0..shard.len() {
                hash.update(shard.key(i).as_bytes());
                // `u64::MAX` stands for a missing image: no image is that long.
                hash.update(&shard.image_bytes(i).unwrap_or(u64::MAX).to_le_bytes());
            }
        }
        self.sampling.add_to(&mut hash);
        hash.digest()
    }

    /// Returns a hash of the checksums of the shards as their indices state them; `None` if one
    /// states none.
    pub fn stated_checksums(&self) -> Option<u64> {
        let mut hash = Xxh3::new();
        for shard in &self.shards {
            hash.update(&shard.index().checksum?.to_le_bytes());
        }
        Some(hash.digest())
    }

    /// Returns a hash of the bytes of a few images, evenly spread, which distinguishes data sets
    /// with the same keys and lengths without reading all images; `None` if shards would have to be
    /// fetched for it. All unusable images have the same contribution.
    ///
    /// # Errors
    /// Errors of [`Dataset::read`] that do not concern the image.
    pub fn sampled_images(&self) -> Result<Option<u64>, PipelineError> {
        if !self.is_local() {
            return Ok(None);
        }
        let n_max = MAX_SAMPLED_IMAGES.min(self.n_samples);
        let total_bytes: u64 = self.spread(n_max).map(|id| self.sample_bytes(id)).sum();
        let mean_bytes = total_bytes / n_max.max(1) + 1;
        let n_sampled = (MAX_SAMPLED_BYTES / mean_bytes).clamp(4, MAX_SAMPLED_IMAGES).min(self.n_samples);
        let mut hash = Xxh3::new();
        for id in self.spread(n_sampled) {
            match self.read(id) {
                Ok(sample) => {
                    for file in sample.image.files() {
                        hash.update(file);
                    }
                }
                // The disk or the network has failed: nothing is known about the image.
                Err(PipelineError::Io { .. }) => return Ok(None),
                Err(error) if error.is_sample_error() => hash.update(b"unusable"),
                Err(error) => return Err(error),
            }
        }
        Ok(Some(hash.digest()))
    }

    /// Returns `n` samples that are evenly spread over the data set; all if it has fewer.
    pub fn spread(&self, n: u64) -> impl Iterator<Item = SampleId> {
        let n_samples = u128::from(self.n_samples);
        let n = n.min(self.n_samples);
        // In 128 bits: the product may not fit into 64.
        (0..n).map(move |index| SampleId((u128::from(index) * n_samples / u128::from(n)) as u64))
    }

    /// Returns the shards, in the order of the list.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Returns the shard that holds sample `id`, and the index of the sample in it.
    pub fn locate(&self, id: SampleId) -> (&Shard, usize) {
        let shard = self.starts.partition_point(|start| *start <= id.0) - 1;
        (&self.shards[shard], (id.0 - self.starts[shard]) as usize)
    }
}

impl std::fmt::Debug for Dataset {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dataset")
            .field("shards", &self.shards.len())
            .field("n_samples", &self.n_samples)
            .finish()
    }
}
