//! A list of shards with their indices: which samples there are, and their bytes on demand.

use std::path::PathBuf;

use crate::PipelineError;
use crate::index::ShardIndex;
use crate::store::{LocalStore, Store};

/// Extensions that hold an image, in the order in which they are preferred.
pub const IMAGE_EXTENSIONS: [&str; 4] = ["jpg", "jpeg", "png", "webp"];

/// Extensions that hold a class number as text.
const LABEL_EXTENSIONS: [&str; 2] = ["cls", "cls2"];

/// A data set that is open for reading. Shared by threads.
pub struct Dataset {
    shards: Vec<Shard>,
    /// Samples before each shard, in the order of the list.
    starts: Vec<u64>,
    n_samples: u64,
}

struct Shard {
    store: Box<dyn Store>,
    index: ShardIndex,
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
    pub fn open(specs: &[String]) -> Result<Self, PipelineError> {
        Self::from_paths(&crate::url::expand(specs)?)
    }

    /// Opens the shards at `paths`.
    ///
    /// # Errors
    /// As [`Dataset::open`].
    pub fn from_paths(paths: &[PathBuf]) -> Result<Self, PipelineError> {
        let mut shards = Vec::with_capacity(paths.len());
        let mut starts = Vec::with_capacity(paths.len());
        let mut n_samples = 0;
        for path in paths {
            let index = ShardIndex::open(path)?;
            starts.push(n_samples);
            n_samples += index.len() as u64;
            shards.push(Shard { store: Box::new(LocalStore::open(path)?), index });
        }
        let dataset = Self { shards, starts, n_samples };
        let any_image = dataset
            .shards
            .iter()
            .any(|shard| (0..shard.index.len()).any(|i| shard.index.member(i, &IMAGE_EXTENSIONS).is_some()));
        if !any_image {
            return Err(PipelineError::Empty {
                n_shards: dataset.shards.len(),
                wanted: IMAGE_EXTENSIONS.join(", "),
                first: dataset.shards.first().map(|s| s.store.name()).unwrap_or_default(),
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
        self.shards.iter().map(|shard| shard.index.len() as u64).collect()
    }

    /// The number of the sample at (`shard`, `sample`).
    pub fn id(&self, shard: usize, sample: u64) -> SampleId {
        SampleId(self.starts[shard] + sample)
    }

    /// Name of the shard that holds sample `id`, its key, and the offset of its first member.
    pub fn describe(&self, id: SampleId) -> (String, String, u64) {
        let (shard, i) = self.locate(id);
        let offset = shard.index.members(i).next().map_or(0, |member| member.offset_bytes);
        (shard.store.name(), shard.index.key(i).to_string(), offset)
    }

    /// Bytes that reading sample `id` will bring into memory.
    pub fn sample_bytes(&self, id: SampleId) -> u64 {
        let (shard, i) = self.locate(id);
        shard.index.member(i, &IMAGE_EXTENSIONS).map_or(0, |member| member.len_bytes)
    }

    /// Reads sample `id`.
    ///
    /// # Errors
    /// [`PipelineError::MissingField`] when it holds no image, [`PipelineError::Io`] when the
    /// shard cannot be read.
    pub fn read(&self, id: SampleId) -> Result<Sample, PipelineError> {
        let (shard, i) = self.locate(id);
        let member = shard.index.member(i, &IMAGE_EXTENSIONS).ok_or_else(|| PipelineError::MissingField {
            shard: shard.store.name(),
            key: shard.index.key(i).to_string(),
            wanted: IMAGE_EXTENSIONS.join(", "),
        })?;
        let mut image = vec![0; member.len_bytes as usize];
        shard.store.read_at(member.offset_bytes, &mut image)?;
        Ok(Sample { id, key: shard.index.key(i).to_string(), image, label: self.label(id)? })
    }

    /// The class of sample `id`, without its image.
    ///
    /// # Errors
    /// [`PipelineError::Io`] when the shard cannot be read.
    pub fn label(&self, id: SampleId) -> Result<Option<u32>, PipelineError> {
        let (shard, i) = self.locate(id);
        let Some(member) = shard.index.member(i, &LABEL_EXTENSIONS) else { return Ok(None) };
        // A class number has at most ten digits; anything longer is not one.
        let mut text = vec![0; member.len_bytes.min(32) as usize];
        shard.store.read_at(member.offset_bytes, &mut text)?;
        Ok(std::str::from_utf8(&text).ok().and_then(|text| text.trim().parse().ok()))
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
