//! What is to be written, and what is said of it.

use networks::ModelConfig;
use networks::NamedTensor;

use crate::precision::Precision;
use crate::preprocessing::Preprocessing;

/// What is to be written.
#[derive(Debug)]
pub struct Export<'a> {
    /// What the network is.
    pub model: &'a ModelConfig,
    /// Its parameters.
    pub tensors: &'a [NamedTensor],
    /// How it sees images.
    pub preprocessing: Preprocessing,
    /// Which network of a run it is.
    pub which: &'a str,
    /// What weights are stored in.
    pub precision: Precision,
    /// Where it comes from, and what it is worth.
    pub card: &'a Card,
}

/// Where a network comes from.
#[derive(Debug, Clone, Default)]
pub struct Card {
    /// Name of the recipe, or of the file that the weights came from.
    pub name: String,
    /// The recipe with every default filled in, if the weights come from a run.
    pub plan: Option<String>,
    /// Images that it was trained on, and how often: a sentence.
    pub data: Option<String>,
    /// What it scores.
    pub scores: Vec<Score>,
    /// Release of the program.
    pub version: String,
}

/// A number of an evaluation.
#[derive(Debug, Clone)]
pub struct Score {
    /// What was measured, on what: `knn (k = 20) on test`.
    pub name: String,
    /// The number with its interval, as people read it.
    pub value: String,
    /// The precision of the weights that were scored.
    pub precision: Precision,
}
