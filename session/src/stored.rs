//! Weights as they are stored: files for other libraries, and scores, which rounding may have
//! changed.

use std::path::{Path, PathBuf};

use eval::{Protocol, Split};
use kernels::device::Opened;
use networks::{NamedTensor, Network};
use pipeline::NoProgress;
use trainer::Recipe;
use weights::{
    Card, Export, ExportedClassifier, Format, HeadKind, Precision, Preprocessing, Score, resampling_note,
    rounded,
};

use crate::error::SessionError;
use crate::head::trained_head;
use crate::network::Backbone;

/// Settings of an export.
#[derive(Debug, Clone)]
pub struct ExportSettings {
    /// The format.
    pub format: Format,
    /// Precision in which weights are stored.
    pub precision: Precision,
    /// Whether the graph of a classifier returns probabilities in place of the scores.
    pub returns_probabilities: bool,
    /// Whether existing files are replaced.
    pub overwrite: bool,
}

impl ExportSettings {
    /// Returns the settings that replace an earlier export in `format`, in f32.
    pub fn replacing(format: Format) -> Self {
        Self { format, precision: Precision::F32, returns_probabilities: false, overwrite: true }
    }
}

/// Checks that `format` can hold the network that runs of `recipe` train, with its classifier if
/// they learn from labels, and its decoder if they learn from masks.
///
/// # Errors
/// [`SessionError::Weights`].
pub fn check_export(recipe: &Recipe, format: Format) -> Result<(), SessionError> {
    let preprocessing = Preprocessing::with_size(recipe.evaluated_px() as u32, recipe.data.pixels());
    Ok(weights::check(format, &recipe.model, &preprocessing, trained_head(recipe))?)
}

impl Backbone {
    /// Returns the kind of the head that is exported with the backbone, if it has one.
    pub fn head_kind(&self) -> Option<HeadKind> {
        if self.classifier.is_some() {
            Some(HeadKind::Classifier)
        } else if self.decoder.is_some() {
            Some(HeadKind::Decoder)
        } else {
            None
        }
    }

    /// Writes the weights, with the classifier or the decoder if there is one, and `card` to `out`,
    /// whose parent folder is created if missing; returns the files.
    ///
    /// # Errors
    /// [`SessionError::Io`] if the folder cannot be created, [`SessionError::Weights`] if files
    /// exist or cannot be written, or if `format` cannot hold the weights.
    pub fn export(
        &self,
        out: &Path,
        settings: &ExportSettings,
        card: &Card,
    ) -> Result<Vec<PathBuf>, SessionError> {
        pipeline::file::create_parent(out)
            .map_err(|source| SessionError::io("create the folder of", out, source))?;
        let size_px = self.preprocessing.transform.size_px as usize;
        if let Some(library) = settings.format.library()
            && let Some(note) = resampling_note(&self.model, library, size_px)
        {
            tracing::warn!("{}: {note}", out.display());
        }
        let returns_probabilities = settings.returns_probabilities;
        let classifier =
            self.classifier.as_ref().map(|head| ExportedClassifier { head, returns_probabilities });
        let export = Export {
            model: &self.model,
            tensors: &self.tensors,
            classifier,
            decoder: self.decoder.as_ref(),
            preprocessing: self.preprocessing.clone(),
            network_name: &self.network_name,
            precision: settings.precision,
            card,
        };
        Ok(weights::write(out, settings.format, &export, settings.overwrite)?)
    }

    /// Scores the weights by `protocols` on `split`, as trained and, if it is another precision, as
    /// they are stored in `precision`.
    ///
    /// # Errors
    /// [`SessionError::Network`] and [`SessionError::Eval`].
    pub fn score_as_stored(
        &self,
        split: &Split,
        protocols: &[Protocol],
        precision: Precision,
    ) -> Result<Vec<Score>, SessionError> {
        let device = Opened::cpu().device;
        let mut precisions = vec![Precision::F32];
        if precision != Precision::F32 {
            precisions.push(precision);
        }
        let mut scores = Vec::new();
        for precision in precisions {
            let mut tensors: Vec<NamedTensor> = Vec::new();
            for tensor in &self.tensors {
                let values = rounded(&tensor.values, &tensor.shape, precision);
                tensors.push(NamedTensor { values, ..tensor.clone() });
            }
            let pixels = self.preprocessing.pixels.clone();
            let network = Network::new(&self.model, pixels, &tensors, 0, &device)?;
            for (_, scored) in split.score(&network, protocols, None, &NoProgress)?.numbers() {
                let name = format!("{} on {}, {}", scored.metric, split.test.name, split.test.transform);
                let interval = Some(scored.outcome.interval());
                scores.push(Score::new(name, scored.outcome.value(), interval, precision));
            }
        }
        Ok(scores)
    }
}
