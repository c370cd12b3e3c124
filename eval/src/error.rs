//! What can go wrong while features are turned into numbers.

use std::path::{Path, PathBuf};

use networks::NetworkError;
use pipeline::PipelineError;

/// An error of evaluation.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// The data path failed.
    #[error(transparent)]
    Data(Box<PipelineError>),
    /// The network's weights cannot be used.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// No sample has a label.
    #[error(
        "none of the {n_samples} images of {split} has a class: probes need a .cls, .cls2 or output.cls member, or `label` \
         or `labels` in a .json member"
    )]
    NoLabels {
        /// The set.
        split: String,
        /// Samples that were looked at.
        n_samples: usize,
    },
    /// No image can be decoded.
    #[error(
        "none of the {n_samples} images of {split} can be decoded; `ocelli shards verify` says why of shards"
    )]
    NoImages {
        /// The set.
        split: String,
        /// Images that were looked at.
        n_samples: usize,
    },
    /// A network gives numbers that are not finite.
    #[error(
        "the features of image {image} of {split} are not finite: the weights or the colors are out of range"
    )]
    NotFinite {
        /// The set.
        split: String,
        /// The image.
        image: String,
    },
    /// No image has a mask.
    #[error(
        "none of the {n_samples} images of {split} has a mask with a class: a seg.png or mask.png member"
    )]
    NoMasks {
        /// The set.
        split: String,
        /// Images that were looked at.
        n_samples: usize,
    },
    /// A mask cannot be read.
    #[error("{shard}, {key}: the mask cannot be used: {reason}")]
    Mask {
        /// The shard.
        shard: String,
        /// The image's key.
        key: String,
        /// Why.
        reason: String,
    },
    /// All pixels are of one class.
    #[error(
        "all pixels of {split} that count are of one class; 255 means that a pixel does not count: masks of 0 and 255 \
         must be written as 0 and 1"
    )]
    OneClass {
        /// The set.
        split: String,
    },
    /// Protocols that look at different images.
    #[error(
        "{protocol} looks at images with masks, the other protocols at images with classes: score them one after the other"
    )]
    Alone {
        /// The protocol.
        protocol: &'static str,
    },
    /// A protocol that knows one class for each image was given several.
    #[error("images of {split} have several classes: only knn scores them (as mAP), not {protocol}")]
    SeveralClasses {
        /// The set.
        split: String,
        /// The protocol.
        protocol: &'static str,
    },
    /// A class with fewer images than shots.
    #[error("few-shot: a class has {n_images} training images, fewer than {shots} shots: --shots")]
    FewImages {
        /// Training images of the smallest class.
        n_images: usize,
        /// Images of each class that are wanted.
        shots: usize,
    },
    /// A protocol that looks at images was given features alone.
    #[error("{protocol} needs the images, not only their features")]
    NoViews {
        /// The protocol.
        protocol: &'static str,
    },
    /// A file of features.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file of features in a format of its own.
    #[error("cannot write {}: {reason}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The images do not fit the network.
    #[error("image size {image_px} px is not a multiple of the network's stride, {stride_px} px")]
    ImageSize {
        /// Side of the images.
        image_px: usize,
        /// Side of a patch.
        stride_px: usize,
    },
    /// A picture could not be made.
    #[error("cannot draw {}: {reason}", path.display())]
    Picture {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A run's metrics cannot be read.
    #[error("cannot read {}: {reason}", path.display())]
    Metrics {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

impl From<PipelineError> for EvalError {
    fn from(error: PipelineError) -> Self {
        Self::Data(Box::new(error))
    }
}

impl EvalError {
    /// Makes an [`EvalError::Io`].
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }

    /// Makes an [`EvalError::Write`].
    pub(crate) fn write(path: &Path, error: impl std::fmt::Display) -> Self {
        Self::Write { path: path.to_path_buf(), reason: error.to_string() }
    }
}
