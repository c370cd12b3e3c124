//! Sources of images: shards or individual files.

use std::path::PathBuf;
use std::sync::Arc;

use pipeline::identity::FileStamp;
use pipeline::shard::MASK_EXTENSIONS;
use pipeline::shard::image::EncodedImage;
use pipeline::{Dataset, PipelineError, SampleId};

/// A source of images by index.
#[derive(Debug, Clone)]
pub enum Source {
    /// Samples of shards.
    Shards(Arc<Dataset>),
    /// Individual image files.
    Files(Arc<Vec<ImageFile>>),
}

/// An individual image file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Name of the image in exported rows and messages.
    pub name: String,
    /// Classes of the image; empty if it is known to be of none, `None` if nothing is known.
    pub classes: Option<Vec<String>>,
}

/// Maximum number of files whose bytes are read to recognize images.
const N_SAMPLED_FILES: usize = 64;

/// Returns whether the file itself is at fault (missing, forbidden, a folder) rather than the disk
/// or the network.
fn is_file_error(error: &std::io::Error) -> bool {
    use std::io::ErrorKind;
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::IsADirectory)
}

impl Source {
    /// Returns the number of images, usable or not.
    pub fn len(&self) -> u64 {
        match self {
            Self::Shards(dataset) => dataset.n_samples(),
            Self::Files(files) => files.len() as u64,
        }
    }

    /// Returns whether there are no images.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the shard of image `index`, if it is in one, and its key there or its name.
    pub fn describe(&self, index: u64) -> (Option<String>, String) {
        match self {
            Self::Shards(dataset) => {
                let (shard, key, _) = dataset.describe(SampleId(index));
                (Some(shard), key)
            }
            Self::Files(files) => (None, files[index as usize].name.clone()),
        }
    }

    /// Returns the encoded image `index`; `None` if the image is missing.
    ///
    /// # Errors
    /// [`PipelineError`] if a shard or file cannot be read.
    pub fn encoded(&self, index: u64) -> Result<Option<EncodedImage>, PipelineError> {
        match self {
            Self::Shards(dataset) => match dataset.read(SampleId(index)) {
                Ok(sample) => Ok(Some(sample.image)),
                // The sample itself is incomplete. Input errors are not properties of the sample
                // and are returned.
                Err(error) if error.is_sample_error() && !matches!(error, PipelineError::Io { .. }) => {
                    Ok(None)
                }
                Err(error) => Err(error),
            },
            Self::Files(files) => match std::fs::read(&files[index as usize].path) {
                Ok(bytes) => Ok(Some(bytes.into())),
                Err(error) if is_file_error(&error) => Ok(None),
                Err(error) => Err(PipelineError::io("read", &files[index as usize].path, error)),
            },
        }
    }

    /// Returns the reason why image `index` cannot be read; `None` if it can.
    ///
    /// # Errors
    /// [`PipelineError`] for a failure that says nothing about the image.
    pub(super) fn flaw(&self, index: u64) -> Result<Option<String>, PipelineError> {
        match self {
            Self::Shards(dataset) => match dataset.read(SampleId(index)) {
                Ok(_) => Ok(None),
                Err(error) if error.is_sample_error() => Ok(Some(error.to_string())),
                Err(error) => Err(error),
            },
            Self::Files(files) => match std::fs::File::open(&files[index as usize].path) {
                Ok(_) => Ok(None),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    Ok(Some("it is missing".into()))
                }
                Err(error) if is_file_error(&error) => Ok(Some("it cannot be read".into())),
                Err(error) => Err(PipelineError::io("read", &files[index as usize].path, error)),
            },
        }
    }

    /// Returns the length of the encoded image `index` in bytes, and the short check of its bytes,
    /// if known; `None` if the image is missing.
    pub fn len_and_check(&self, index: u64) -> Option<(u64, Option<u16>)> {
        match self {
            Self::Shards(dataset) => dataset.image_check(SampleId(index)),
            Self::Files(files) => Some((std::fs::metadata(&files[index as usize].path).ok()?.len(), None)),
        }
    }

    /// Returns the names of the classes of image `index`.
    ///
    /// # Errors
    /// [`PipelineError`] if a shard cannot be read.
    pub fn classes(&self, index: u64) -> Result<Vec<String>, PipelineError> {
        match self {
            Self::Shards(dataset) => dataset.classes(SampleId(index)),
            Self::Files(files) => Ok(files[index as usize].classes.clone().unwrap_or_default()),
        }
    }

    /// Returns whether image `index` states that it is of no class, which an empty list does.
    ///
    /// # Errors
    /// [`PipelineError`] if a shard cannot be read.
    pub fn states_no_class(&self, index: u64) -> Result<bool, PipelineError> {
        match self {
            Self::Shards(dataset) => dataset.states_no_class(SampleId(index)),
            Self::Files(files) => Ok(files[index as usize].classes.as_ref().is_some_and(Vec::is_empty)),
        }
    }

    /// Returns the encoded mask of image `index`, if it has one.
    ///
    /// # Errors
    /// [`PipelineError`] if a shard cannot be read.
    pub fn mask(&self, index: u64) -> Result<Option<Vec<u8>>, PipelineError> {
        match self {
            Self::Shards(dataset) => dataset.member(SampleId(index), &MASK_EXTENSIONS),
            Self::Files(_) => Ok(None),
        }
    }

    /// Returns whether `other` lists the same images, whatever their bytes.
    pub(super) fn has_listing_of(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Shards(a), Self::Shards(b)) => a.samples_fingerprint() == b.samples_fingerprint(),
            (Self::Files(a), Self::Files(b)) => a == b,
            _ => false,
        }
    }

    /// Returns a hash by which parts of a job, on any machines, recognize the images: their names
    /// and lengths, and the checksums that indices state or a few images' bytes.
    ///
    /// # Errors
    /// [`PipelineError`] if a shard cannot be read.
    pub fn recognition(&self) -> Result<u64, PipelineError> {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        match self {
            Self::Shards(dataset) => {
                hash.update(&dataset.samples_fingerprint().to_le_bytes());
                let bytes = match dataset.stated_checksums() {
                    Some(checksums) => Some(checksums),
                    None => dataset.sampled_images()?,
                };
                hash.update(format!("{bytes:?}").as_bytes());
            }
            Self::Files(files) => {
                for file in files.iter() {
                    let len_bytes = std::fs::metadata(&file.path).map_or(0, |about| about.len());
                    hash.update(format!("{:?} {len_bytes}\n", file.name).as_bytes());
                }
                let n_sampled = files.len().min(N_SAMPLED_FILES);
                for i in 0..n_sampled {
                    // The length of a file that cannot be read is hashed above.
                    let path = &files[i * files.len() / n_sampled].path;
                    hash.update(&std::fs::read(path).unwrap_or_default());
                }
            }
        }
        Ok(hash.digest())
    }

    /// Returns a hash that identifies the images: by the bytes of each shard, or by the state of
    /// each file (see [`pipeline::identity`]).
    ///
    /// # Errors
    /// [`PipelineError`] if a shard cannot be read.
    pub fn fingerprint(&self) -> Result<u64, PipelineError> {
        match self {
            Self::Shards(dataset) => dataset.fingerprint(),
            Self::Files(files) => {
                let mut hash = xxhash_rust::xxh3::Xxh3::new();
                for file in files.iter() {
                    hash.update(format!("{:?} ", file.name).as_bytes());
                    match std::fs::metadata(&file.path) {
                        Ok(about) => hash.update(FileStamp::from_metadata(&about).to_string().as_bytes()),
                        Err(_) => hash.update(file.path.as_os_str().as_encoded_bytes()),
                    }
                    hash.update(b"\n");
                }
                Ok(hash.digest())
            }
        }
    }
}
