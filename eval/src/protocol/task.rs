//! Input and output of a protocol.

use networks::Network;
use serde_json::Value;

use super::views::Views;
use crate::features::cache::FeatureCache;
use crate::features::set::FeatureSet;
use crate::images::ImageSet;
use crate::statistics::outcome::Outcome;
use pipeline::Progress;

/// Input of a protocol.
#[derive(Clone, Copy)]
pub struct Task<'a> {
    /// Features that classifiers are fitted on.
    pub train: &'a FeatureSet,
    /// Features that are scored.
    pub test: &'a FeatureSet,
    /// Number of classes of both sets.
    pub n_classes: usize,
    /// Seed of shuffles, initial weights and draws.
    pub seed: u64,
    /// Source of augmented views of the training images, for protocols that draw them.
    pub views: Option<&'a Views<'a>>,
    /// Images, for protocols that need more than vectors and classes.
    pub sets: Option<&'a Sets<'a>>,
    /// Receiver of progress reports.
    pub progress: &'a dyn Progress,
}

/// Image sets and the network to evaluate on them.
pub struct Sets<'a> {
    /// The network.
    pub network: &'a Network,
    /// Images that classifiers are fitted on.
    pub train: &'a ImageSet,
    /// Images that are scored.
    pub test: &'a ImageSet,
    /// Cache of features.
    pub cache: Option<&'a FeatureCache>,
}

/// A number of a protocol and its origin.
#[derive(Debug, Clone, PartialEq)]
pub struct Scored {
    /// Name, unique among the numbers of all protocols: `knn_20`.
    pub metric: String,
    /// Result on the test set.
    pub outcome: Outcome,
    /// Chosen settings and the data that they were chosen on.
    pub details: Value,
    /// Number of images used, if it differs from the images with classes.
    pub counts: Option<Counts>,
}

/// Numbers of images that a protocol used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Images that were fitted on.
    pub n_train: usize,
    /// Images that were scored.
    pub n_test: usize,
    /// Images of both sets that could not be decoded.
    pub n_bad: usize,
}
