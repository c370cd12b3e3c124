//! A backbone that was read from a file, and the hints for reading it.

use augment::Depth;
use networks::ClassHead;
use networks::ModelConfig;
use networks::NamedTensor;
use networks::Normalization;
use networks::Origin;
use networks::PixelHead;

use crate::library::Library;
use crate::preprocessing::Preprocessing;

/// Facts about a file that the user states because the file may not state them.
#[derive(Debug, Clone, Default)]
pub struct Hints {
    /// Library whose code made the file.
    pub library: Option<Library>,
    /// Number of attention heads.
    pub heads: Option<usize>,
    /// Mean and standard deviation by which colors are normalized.
    pub normalization: Option<Normalization>,
    /// Type of the pixels' values.
    pub depth: Option<Depth>,
    /// Term that layer norms add to the variance.
    pub norm_epsilon: Option<f64>,
    /// Name of the network to read, in a file that holds several.
    pub network: Option<String>,
}

impl Hints {
    /// Returns whether nothing is stated.
    pub fn is_empty(&self) -> bool {
        !self.states_facts() && self.network.is_none()
    }

    /// Returns whether a fact about the weights is stated, beside the name of their network.
    pub fn states_facts(&self) -> bool {
        let Self { library, heads, normalization, depth, norm_epsilon, network: _ } = self;
        library.is_some()
            || heads.is_some()
            || normalization.is_some()
            || depth.is_some()
            || norm_epsilon.is_some()
    }
}

/// A backbone that was read from a file.
#[derive(Debug)]
pub struct Pretrained {
    /// Configuration of the network.
    pub model: ModelConfig,
    /// Preprocessing of its images.
    pub preprocessing: Preprocessing,
    /// Parameters, by Ocelli's names.
    pub tensors: Vec<NamedTensor>,
    /// Classifier on its features, if `ocelli export` has written the file with one.
    pub classifier: Option<ClassHead>,
    /// Decoder of its features that labels pixels, if `ocelli export` has written the file with
    /// one.
    pub decoder: Option<PixelHead>,
    /// Name of the network within its run, or `weights`.
    pub network_name: String,
    /// Name of the library that made it, or `ocelli`.
    pub origin: &'static str,
    /// License that the file or its folder states.
    pub license: Option<String>,
    /// Weights that the network began with, the latest first, as a file of Ocelli states them.
    pub began_with: Vec<Origin>,
    /// Assumptions that were made, one sentence each.
    pub assumed: Vec<String>,
}
