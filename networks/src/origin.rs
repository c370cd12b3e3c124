//! Weights that a network began with.

use serde::{Deserialize, Serialize};

/// Weights of another library or run that a network began with. Their license applies to the
/// network, too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// Name of the file, of the folder or of the run's work directory.
    pub name: String,
    /// Number of steps that the run had taken; absent for weights that belong to no run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// Name of the library that made the weights, or `ocelli`; empty if it is not known.
    pub library: String,
    /// Fingerprint of the backbone's weights, as `weights::fingerprint` computes it.
    pub fingerprint: String,
    /// License that the weights state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub license: Option<String>,
}

impl Origin {
    /// Returns the license, or where to look for it.
    pub fn license_in_words(&self) -> &str {
        match &self.license {
            Some(license) => license,
            None if self.library == "ocelli" => "none stated",
            None => "unknown: see the source",
        }
    }
}
