//! Networks to be written, and the facts that their cards state.

use networks::{ClassHead, ModelConfig, NamedTensor, Origin, PixelHead};

use crate::precision::Precision;
use crate::preprocessing::Preprocessing;

/// A network to be written.
#[derive(Debug)]
pub struct Export<'a> {
    /// Configuration of the network.
    pub model: &'a ModelConfig,
    /// Parameters of the network.
    pub tensors: &'a [NamedTensor],
    /// Classifier on its features, to be written with it.
    pub classifier: Option<ExportedClassifier<'a>>,
    /// Decoder of its features that labels pixels, to be written with it.
    pub decoder: Option<&'a PixelHead>,
    /// Preprocessing of its images.
    pub preprocessing: Preprocessing,
    /// Name of the network within its run.
    pub network_name: &'a str,
    /// Precision in which weights are stored.
    pub precision: Precision,
    /// Origin and scores.
    pub card: &'a Card,
}

impl Export<'_> {
    /// Returns the same without the values of the parameters, to find out what a format can hold.
    pub(crate) fn without_values(&self) -> Self {
        Self {
            model: self.model,
            tensors: &[],
            classifier: self.classifier,
            decoder: self.decoder,
            preprocessing: self.preprocessing.clone(),
            network_name: self.network_name,
            precision: self.precision,
            card: self.card,
        }
    }

    /// Returns the parameters of the classifier and of the decoder, by Ocelli's names; none without
    /// either.
    pub(crate) fn head_tensors(&self) -> Vec<NamedTensor> {
        let mut tensors = Vec::new();
        if let Some(classifier) = &self.classifier {
            tensors.extend(classifier.head.tensors());
        }
        if let Some(decoder) = self.decoder {
            tensors.extend_from_slice(&decoder.tensors);
        }
        tensors
    }
}

/// Kind of what is written with a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadKind {
    /// A classifier of images.
    Classifier,
    /// A decoder that labels pixels.
    Decoder,
}

/// A classifier to be written with its network.
#[derive(Debug, Clone, Copy)]
pub struct ExportedClassifier<'a> {
    /// The head, with the names of the classes.
    pub head: &'a ClassHead,
    /// Whether a graph returns probabilities in place of the scores: their softmax, or their
    /// sigmoids where an image may have several classes. Other formats hold no operations.
    pub returns_probabilities: bool,
}

/// Origin and scores of a network, for its card.
#[derive(Debug, Clone, Default)]
pub struct Card {
    /// Name of the recipe, or of the file that the weights come from.
    pub name: String,
    /// The recipe with every default filled in, if the weights come from a run.
    pub plan: Option<String>,
    /// Sentence about the images that it was trained on, and how often.
    pub data: Option<String>,
    /// Weights that it began with, the latest first.
    pub origins: Vec<Origin>,
    /// Scores in evaluations.
    pub scores: Vec<Score>,
    /// Version of the program.
    pub version: String,
}

/// Result of an evaluation.
#[derive(Debug, Clone)]
pub struct Score {
    /// Metric and data set: `knn (k = 20) on test`.
    pub name: String,
    /// Value and confidence interval, formatted for reading.
    pub value: String,
    /// Precision of the weights that were scored.
    pub precision: Precision,
}

impl Score {
    /// Returns the score `name` of weights of `precision`, with `value` and its interval formatted.
    pub fn new(name: String, value: f64, interval: Option<[f64; 2]>, precision: Precision) -> Self {
        let value = match interval {
            Some([low, high]) => format!("{value:.2} ({low:.1} - {high:.1})"),
            None => format!("{value:.4}"),
        };
        Self { name, value, precision }
    }
}
