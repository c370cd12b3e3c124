//! What a protocol is given, and what it gives.

use networks::Network;
use serde_json::Value;

use super::views::Views;
use crate::features::cache::FeatureCache;
use crate::features::extract::Progress;
use crate::features::set::FeatureSet;
use crate::images::ImageSet;
use crate::score::outcome::Outcome;

/// What is scored.
#[derive(Clone, Copy)]
pub struct Task<'a> {
    /// What classifiers are made from.
    pub train: &'a FeatureSet,
    /// What the numbers are about.
    pub test: &'a FeatureSet,
    /// Classes of both.
    pub n_classes: usize,
    /// Seed of orders, initial weights and draws.
    pub seed: u64,
    /// Views of train, for protocols that draw them.
    pub views: Option<&'a Views<'a>>,
    /// The images themselves, for protocols that look at more than vectors and classes.
    pub sets: Option<&'a Sets<'a>>,
    /// What is told of protocols that take long.
    pub progress: &'a dyn Progress,
}

/// Images, and the network that sees them.
pub struct Sets<'a> {
    /// The network.
    pub network: &'a Network,
    /// What classifiers are made from.
    pub train: &'a ImageSet,
    /// What the numbers are about.
    pub test: &'a ImageSet,
    /// Where features are kept.
    pub cache: Option<&'a FeatureCache>,
}

/// A number, and what it came from.
#[derive(Debug, Clone, PartialEq)]
pub struct Scored {
    /// What it is called among the numbers of all protocols: `knn_20`.
    pub metric: String,
    /// What was made of the test set.
    pub outcome: Outcome,
    /// What was chosen, and on what.
    pub details: Value,
    /// The images that it looked at, where they are not those with classes.
    pub counts: Option<Counts>,
}

/// Images that a protocol looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Images that were fitted on.
    pub n_train: usize,
    /// Images that were scored.
    pub n_test: usize,
    /// Images of both sets that could not be decoded.
    pub n_bad: usize,
}
