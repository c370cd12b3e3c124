//! Where images lie: in shards, or in files of their own.

use std::path::PathBuf;
use std::sync::Arc;

use pipeline::{Dataset, PipelineError, SampleId};

/// Extensions that hold a mask, in the order in which they are preferred.
const MASK_EXTENSIONS: [&str; 3] = ["seg.png", "mask.png", "output.png"];

/// Images by index.
#[derive(Debug, Clone)]
pub enum Source {
    /// Samples of shards.
    Shards(Arc<Dataset>),
    /// Files.
    Files(Arc<Vec<ImageFile>>),
}

/// An image in a file of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageFile {
    /// Where it lies.
    pub path: PathBuf,
    /// What its row is called.
    pub name: String,
    /// Its class, where it is known.
    pub class: Option<String>,
}

impl Source {
    /// Images, usable or not.
    pub fn len(&self) -> u64 {
        match self {
            Self::Shards(dataset) => dataset.n_samples(),
            Self::Files(files) => files.len() as u64,
        }
    }

    /// Whether there is no image.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The shard of image `index`, where it lies in one, and its key there or its name.
    pub fn describe(&self, index: u64) -> (Option<String>, String) {
        match self {
            Self::Shards(dataset) => {
                let (shard, key, _) = dataset.describe(SampleId(index));
                (Some(shard), key)
            }
            Self::Files(files) => (None, files[index as usize].name.clone()),
        }
    }

    /// The encoded image `index`; `None` if it is not there.
    ///
    /// # Errors
    /// [`PipelineError`] when a shard cannot be read.
    pub fn bytes(&self, index: u64) -> Result<Option<Vec<u8>>, PipelineError> {
        match self {
            Self::Shards(dataset) => match dataset.read(SampleId(index)) {
                Ok(sample) => Ok(Some(sample.image)),
                // What the sample itself lacks; a disk or a network that fails says nothing of the sample.
                Err(error) if error.is_of_a_sample() && !matches!(error, PipelineError::Io { .. }) => {
                    Ok(None)
                }
                Err(error) => Err(error),
            },
            Self::Files(files) => match std::fs::read(&files[index as usize].path) {
                Ok(bytes) => Ok(Some(bytes)),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(PipelineError::io("read", &files[index as usize].path, error)),
            },
        }
    }

    /// Length of the encoded image `index`, and the short check of its bytes where that is known; `None` if it is not
    /// there.
    pub fn len_and_check(&self, index: u64) -> Option<(u64, Option<u16>)> {
        match self {
            Self::Shards(dataset) => dataset.image_check(SampleId(index)),
            Self::Files(files) => Some((std::fs::metadata(&files[index as usize].path).ok()?.len(), None)),
        }
    }

    /// The classes of image `index` as they are written there.
    ///
    /// # Errors
    /// [`PipelineError`] when a shard cannot be read.
    pub fn classes(&self, index: u64) -> Result<Vec<String>, PipelineError> {
        match self {
            Self::Shards(dataset) => dataset.classes(SampleId(index)),
            Self::Files(files) => Ok(files[index as usize].class.clone().into_iter().collect()),
        }
    }

    /// The encoded mask of image `index`, where it has one.
    ///
    /// # Errors
    /// [`PipelineError`] when a shard cannot be read.
    pub fn mask(&self, index: u64) -> Result<Option<Vec<u8>>, PipelineError> {
        match self {
            Self::Shards(dataset) => dataset.member(SampleId(index), &MASK_EXTENSIONS),
            Self::Files(_) => Ok(None),
        }
    }

    /// Names what is read, down to the last member of each shard or the size and age of each file.
    pub fn fingerprint(&self) -> u64 {
        match self {
            Self::Shards(dataset) => dataset.fingerprint(),
            Self::Files(files) => {
                let mut hash = xxhash_rust::xxh3::Xxh3::new();
                for file in files.iter() {
                    let about = std::fs::metadata(&file.path).ok();
                    let about = about.map(|about| (about.len(), about.modified().ok()));
                    hash.update(format!("{} {about:?}\n", file.path.display()).as_bytes());
                }
                hash.digest()
            }
        }
    }
}
