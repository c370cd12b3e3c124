//! What can go wrong while features are turned into numbers.

use std::path::PathBuf;

use pipeline::PipelineError;
use trainer::TrainError;

/// An error of evaluation.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// The data path failed.
    #[error(transparent)]
    Data(#[from] PipelineError),
    /// The checkpoint or the network failed.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// No sample has a label.
    #[error("none of the {n_samples} samples of the {split} shards has a label: probes need a .cls member")]
    NoLabels {
        /// "train" or "test".
        split: &'static str,
        /// Samples that were looked at.
        n_samples: usize,
    },
    /// No labelled image can be decoded.
    #[error(
        "none of the {n_samples} labelled images of the {split} shards can be decoded; `ocelli shards verify` \
         says why"
    )]
    NoImages {
        /// "train" or "test".
        split: &'static str,
        /// Labelled samples.
        n_samples: usize,
    },
    /// The images do not fit the network.
    #[error("images of {image_px} px do not divide by the network's stride of {stride_px} px")]
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
