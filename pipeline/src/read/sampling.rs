//! Frequencies with which the samples of a data set are shown.
//!
//! They belong to the data set. [`super::order`] applies them as functions of the position: shares
//! by [`super::mix`], weights by [`super::weights`].

use xxhash_rust::xxh3::Xxh3;

/// Shares of sources, and weights of samples. By default every sample is shown once an epoch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sampling {
    /// Sources that are mixed, in the order of their shards; none if the data set is not a mix.
    pub sources: Vec<MixedSource>,
    /// Weight of each sample, by its index in the data set; `None` if all are alike. Weights are
    /// relative to the others of the same source.
    pub weights: Option<Vec<f64>>,
}

/// A source of a mix.
#[derive(Debug, Clone, PartialEq)]
pub struct MixedSource {
    /// Name of the source, for metrics.
    pub name: String,
    /// Share of the source, relative to the others.
    pub share: f64,
    /// Number of its shards.
    pub n_shards: usize,
}

impl Sampling {
    /// Adds what distinguishes this sampling from others to `hash`.
    pub(super) fn add_to(&self, hash: &mut Xxh3) {
        for source in &self.sources {
            hash.update(source.name.as_bytes());
            hash.update(&source.share.to_le_bytes());
            hash.update(&(source.n_shards as u64).to_le_bytes());
        }
        for weight in self.weights.iter().flatten() {
            hash.update(&weight.to_le_bytes());
        }
    }
}
