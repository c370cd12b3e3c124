//! A backbone that was read, and what is needed to read it.

use networks::ModelConfig;
use networks::NamedTensor;
use networks::Normalization;

use crate::library::Library;
use crate::preprocessing::Preprocessing;

/// What a user knows that a file does not say.
#[derive(Debug, Clone, Default)]
pub struct Hints {
    /// The library whose code made it.
    pub library: Option<Library>,
    /// Attention heads.
    pub heads: Option<usize>,
    /// What colors are normalized with.
    pub normalization: Option<Normalization>,
    /// Name of the network that is meant, in a file that holds several.
    pub network: Option<String>,
}

/// A backbone of a file.
#[derive(Debug)]
pub struct Pretrained {
    /// What it is.
    pub model: ModelConfig,
    /// How it sees images.
    pub preprocessing: Preprocessing,
    /// Its parameters, by our names.
    pub tensors: Vec<NamedTensor>,
    /// Which network of a run it is, or `weights`.
    pub which: String,
    /// Where it comes from: `timm`, or `ocelli`.
    pub origin: &'static str,
    /// What was taken for granted, a sentence each.
    pub assumed: Vec<String>,
}
