//! Errors of evaluation.

use std::path::{Path, PathBuf};

use networks::NetworkError;
use pipeline::PipelineError;
use prep::PrepError;

/// An error of evaluation.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// Reading the data failed.
    #[error(transparent)]
    Data(Box<PipelineError>),
    /// A data set cannot be opened, or a part of a job is missing or in use.
    #[error(transparent)]
    Prep(Box<PrepError>),
    /// The network's weights cannot be used.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// No image has a class.
    #[error(
        "none of the {n_samples} images of {split} has a class: probes need a .cls, .cls2 or output.cls \
         member, or `label` or `labels` in a .json member"
    )]
    NoLabels {
        /// The set.
        split: String,
        /// Images of the set.
        n_samples: usize,
    },
    /// Two sets have different names for a class.
    #[error(
        "class {class} is {:?} in {} and {:?} in {}: the lists of names (classes.txt) beside them differ, so \
         their classes are numbered differently",
        names[0], splits[0], names[1], splits[1]
    )]
    ClassNames {
        /// The class.
        class: String,
        /// Its two names.
        names: [String; 2],
        /// The sets.
        splits: [String; 2],
    },
    /// No image can be decoded.
    #[error("none of the {n_samples} images of {split} can be decoded: {reason}")]
    NoImages {
        /// The set.
        split: String,
        /// Images of the set.
        n_samples: usize,
        /// What a few of them have in common, or the reason of the first.
        reason: String,
    },
    /// The network's features are not finite.
    #[error(
        "the features of image {image} of {split} are not finite: the weights or the color mean or std are \
         wrong"
    )]
    NotFinite {
        /// The set.
        split: String,
        /// The image.
        image: String,
    },
    /// No image has a mask with a pixel that counts.
    #[error(
        "none of the {n_samples} images of {split} has a mask with a class: masks are seg.png, mask.png or \
         output.png members"
    )]
    NoMasks {
        /// The set.
        split: String,
        /// Images of the set.
        n_samples: usize,
    },
    /// A mask cannot be read.
    #[error("{shard}, {key}: the mask cannot be used: {reason}")]
    Mask {
        /// The shard.
        shard: String,
        /// The image's key.
        key: String,
        /// Reason.
        reason: String,
    },
    /// All pixels that count are of one class.
    #[error(
        "all labeled pixels of {split} are of one class; 255 marks ignored pixels: write binary masks as \
         0 and 1, not 0 and 255"
    )]
    OneClass {
        /// The set.
        split: String,
    },
    /// The protocols need different images: with masks and with classes.
    #[error(
        "{protocol} scores images with masks, the other protocols images with classes: run them one after \
         the other"
    )]
    MixedInputs {
        /// The protocol that needs masks.
        protocol: &'static str,
    },
    /// Images have several classes, but the protocol supports one class per image.
    #[error("some images of {split} have several classes: knn scores them (as mAP), {protocol} does not")]
    SeveralClasses {
        /// The set.
        split: String,
        /// The protocol.
        protocol: &'static str,
    },
    /// A class has fewer training images than shots.
    #[error(
        "few-shot: a class has {n_images} training images, fewer than {shots} shots: lower few-shot.shots"
    )]
    TooFewImages {
        /// Training images of the smallest class.
        n_images: usize,
        /// Images of each class that the protocol draws.
        shots: usize,
    },
    /// The protocol needs images, but only features are available.
    #[error("{protocol} needs the images, not only their features")]
    ImagesRequired {
        /// The protocol.
        protocol: &'static str,
    },
    /// Input or output failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// Failed operation, as a verb: `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Reason.
        source: std::io::Error,
    },
    /// A file of features cannot be written in its format.
    #[error("cannot write {}: {reason}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Reason.
        reason: String,
    },
    /// A file of features cannot be used.
    #[error("{} cannot be used as features: {reason}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Reason.
        reason: String,
    },
    /// A folder or a list of files names no image.
    #[error("{} contains no images", path.display())]
    NoFiles {
        /// The folder or the list.
        path: PathBuf,
    },
    /// A file of features exists.
    #[error("{} exists; pass --overwrite to replace it", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// There are fewer images than parts.
    #[error("{n_images} images cannot be divided into {n_parts} parts")]
    TooManyParts {
        /// Images of the set.
        n_images: usize,
        /// Parts of the job.
        n_parts: usize,
    },
    /// No parts are to be joined.
    #[error("--join found no parts")]
    NoParts,
    /// The features of a part have no description of their columns.
    #[error("{} does not describe its columns: {source}", path.display())]
    NoColumns {
        /// File of the part.
        path: PathBuf,
        /// Reason.
        source: serde_json::Error,
    },
    /// A part has the features of an image that is not among its images.
    #[error("{} has a row for {key}, which is not an image of its part", path.display())]
    OtherRow {
        /// File of the part.
        path: PathBuf,
        /// The image's key.
        key: String,
    },
    /// The features of a part belong to another job.
    #[error(
        "{} holds features of another network, other images or another kind; pass --overwrite to replace a \
         part", path.display()
    )]
    OtherFeatures {
        /// File of the part.
        path: PathBuf,
    },
    /// The image size is not a multiple of the network's stride.
    #[error("image size {image_px} px is not a multiple of the network's stride, {stride_px} px")]
    ImageSize {
        /// Side of the images in pixels.
        image_px: usize,
        /// Stride of the network in pixels, such as the side of a ViT's patch.
        stride_px: usize,
    },
}

impl From<PipelineError> for EvalError {
    fn from(error: PipelineError) -> Self {
        Self::Data(Box::new(error))
    }
}

impl From<PrepError> for EvalError {
    fn from(error: PrepError) -> Self {
        Self::Prep(Box::new(error))
    }
}

impl EvalError {
    /// Returns an [`EvalError::Io`].
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }

    /// Returns an [`EvalError::Write`].
    pub(crate) fn write(path: &Path, error: impl std::fmt::Display) -> Self {
        Self::Write { path: path.to_path_buf(), reason: error.to_string() }
    }

    /// Returns an [`EvalError::Read`].
    pub(crate) fn read(path: &Path, error: impl std::fmt::Display) -> Self {
        Self::Read { path: path.to_path_buf(), reason: error.to_string() }
    }
}
