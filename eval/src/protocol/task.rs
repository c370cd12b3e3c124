//! What a protocol is given, and what it gives.

use serde_json::Value;

use super::views::Views;
use crate::features::extract::Progress;
use crate::features::set::FeatureSet;
use crate::score::Classified;

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
    /// What is told of protocols that take long.
    pub progress: &'a dyn Progress,
}

/// A number, and what it came from.
#[derive(Debug, Clone, PartialEq)]
pub struct Scored {
    /// What it is called among the numbers of all protocols: `knn_20`.
    pub metric: String,
    /// What was made of the test set.
    pub classified: Classified,
    /// What was chosen, and on what.
    pub details: Value,
}
