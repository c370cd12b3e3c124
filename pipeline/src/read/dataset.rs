//! A list of shards with their indices: which samples there are, and their bytes on demand.

use xxhash_rust::xxh3::Xxh3;

use crate::shard::{IMAGE_EXTENSIONS, Shard};
use crate::{PipelineError, Storage};

/// A data set that is open for reading. Shared by threads.
pub struct Dataset {
    shards: Vec<Shard>,
    /// Samples before each shard, in the order of the list.
    starts: Vec<u64>,
    n_samples: u64,
}

/// Number of a sample in its data set, in the order of the shard list. It names the sample for
/// ever: seeds of crops and rows of feature files are keyed by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SampleId(pub u64);

/// One sample's image, still encoded, and its label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// Its number.
    pub id: SampleId,
    /// Its key in the shard.
    pub key: String,
    /// The encoded image.
    pub image: Vec<u8>,
    /// The class, where the sample has one.
    pub label: Option<u32>,
}

impl Dataset {
    /// Opens the shards that `specs` names (see [`crate::url::expand`]).
    ///
    /// # Errors
    /// Whatever is wrong with the list, a shard or an index; [`PipelineError::Empty`] when no
    /// shard holds an image.
    pub fn open(specs: &[String], storage: &Storage) -> Result<Self, PipelineError> {
        Self::new(storage.open_all(&storage.sources(specs)?)?)
    }

    /// The samples of `shards`, in their order.
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
        let dataset = Self { shards, starts, n_samples };
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

    /// Samples in all shards, usable or not.
    pub fn n_samples(&self) -> u64 {
        self.n_samples
    }

    /// Samples of each shard, in the order of the list.
    pub fn shard_sizes(&self) -> Vec<u64> {
        self.shards.iter().map(|shard| shard.len() as u64).collect()
    }

    /// Has the shards with these numbers fetched in the background, in this order, where they are not
    /// read where they stand.
    pub fn prefetch(&self, shards: &[usize]) {
        for shard in shards {
            self.shards[*shard].prefetch();
        }
    }

    /// Whether all shards are read where they stand.
    pub fn is_local(&self) -> bool {
        self.shards.iter().all(|shard| shard.cache_use().is_none())
    }

    /// Checks that the cache holds the window that is read and the one that is fetched, whichever they
    /// are.
    ///
    /// # Errors
    /// [`PipelineError::CacheTooSmall`].
    pub fn check_cache(&self, window_shards: usize) -> Result<(), PipelineError> {
        let mut uses: Vec<_> = self.shards.iter().filter_map(Shard::cache_use).collect();
        uses.sort_unstable_by_key(|cached| std::cmp::Reverse(cached.len_bytes));
        let windows = uses.iter().take(window_shards.max(1).saturating_mul(2));
        let needed_bytes = windows.fold(0u64, |sum, cached| sum.saturating_add(cached.len_bytes));
        match uses.first() {
            Some(cached) if cached.max_bytes < needed_bytes => {
                Err(PipelineError::CacheTooSmall { needed_bytes, max_bytes: cached.max_bytes })
            }
            _ => Ok(()),
        }
    }

    /// The number of the sample at (`shard`, `sample`).
    pub fn id(&self, shard: usize, sample: u64) -> SampleId {
        SampleId(self.starts[shard] + sample)
    }

    /// Name of the shard that holds sample `id`, its key, and the offset of its first member.
    pub fn describe(&self, id: SampleId) -> (String, String, u64) {
        let (shard, i) = self.locate(id);
        (shard.name(), shard.key(i).to_string(), shard.offset_bytes(i))
    }

    /// Bytes that reading sample `id` will bring into memory.
    pub fn sample_bytes(&self, id: SampleId) -> u64 {
        let (shard, i) = self.locate(id);
        shard.image_bytes(i).unwrap_or(0)
    }

    /// Reads sample `id`.
    ///
    /// # Errors
    /// [`PipelineError::MissingField`] when it holds no image, [`PipelineError::Io`] when the
    /// shard cannot be read.
    pub fn read(&self, id: SampleId) -> Result<Sample, PipelineError> {
        let (shard, i) = self.locate(id);
        let image = shard.image(i)?;
        Ok(Sample { id, key: shard.key(i).to_string(), image, label: shard.label(i)? })
    }

    /// The class of sample `id`, without its image.
    ///
    /// # Errors
    /// [`PipelineError::Io`] when the shard cannot be read.
    pub fn label(&self, id: SampleId) -> Result<Option<u32>, PipelineError> {
        let (shard, i) = self.locate(id);
        shard.label(i)
    }

    /// The classes of sample `id`, numbers or names: none, one or several.
    ///
    /// # Errors
    /// [`PipelineError::Io`] when the shard cannot be read.
    pub fn classes(&self, id: SampleId) -> Result<Vec<String>, PipelineError> {
        let (shard, i) = self.locate(id);
        shard.classes(i)
    }

    /// The first of the members of sample `id` that have one of `extensions`, in their order.
    ///
    /// # Errors
    /// [`PipelineError::Io`] when the shard cannot be read.
    pub fn member(&self, id: SampleId, extensions: &[&str]) -> Result<Option<Vec<u8>>, PipelineError> {
        let (shard, i) = self.locate(id);
        shard.member(i, extensions)
    }

    /// Length of the encoded image of sample `id`, if it has one, and the short check of its bytes where that is known:
    /// images that differ in either are not the same.
    pub fn image_check(&self, id: SampleId) -> Option<(u64, Option<u16>)> {
        let (shard, i) = self.locate(id);
        let member = shard.index().member(i, &IMAGE_EXTENSIONS)?;
        Some((member.len_bytes, member.check))
    }

    /// Names the samples: equal for the same members in the same order, wherever the shards lie.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Xxh3::new();
        self.shards.iter().for_each(|shard| hash.update(&shard.index().fingerprint().to_le_bytes()));
        hash.digest()
    }

    /// Names the samples by their keys and the lengths of their images, in their order: equal for the same shards wherever
    /// they lie, with an index beside them or without.
    pub fn samples_fingerprint(&self) -> u64 {
        let mut hash = Xxh3::new();
        for shard in &self.shards {
            hash.update(&(shard.len() as u64).to_le_bytes());
            for i in 0..shard.len() {
                hash.update(shard.key(i).as_bytes());
                // No image is as long as that.
                hash.update(&shard.image_bytes(i).unwrap_or(u64::MAX).to_le_bytes());
            }
        }
        hash.digest()
    }

    fn locate(&self, id: SampleId) -> (&Shard, usize) {
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
