//! Classifiers: networks of runs that have learned from labels, with their heads.

use std::path::Path;

use eval::image_sets::set_name;
use eval::row::{EvaluationRow, ImageSetInfo};
use eval::scores::classifier_rows;
use eval::{Classified, FeatureCache, ImageSet, classify};
use kernels::device::Device;
use networks::ClassHead;
use pipeline::Progress;
use trainer::Plan;

use crate::error::SessionError;
use crate::evaluated_network::{EvaluatedNetwork, NetworkSettings};

/// A network that was trained to classify images, with its head.
pub struct Classifier {
    /// The network, and its origin.
    pub network: EvaluatedNetwork,
    /// The head, with the names of the classes.
    pub head: ClassHead,
    /// Images that it was trained on; weights do not state them.
    train: Option<ImageSetInfo>,
}

impl Classifier {
    /// Opens the classifier in `path`, a run, a checkpoint or a file of `ocelli export`, on
    /// `device`.
    ///
    /// # Errors
    /// [`SessionError::NotClassifier`] for a run of another method, [`SessionError::NoClassifier`]
    /// for other weights, and errors of [`EvaluatedNetwork::open`].
    pub fn open(path: &Path, settings: &NetworkSettings, device: &Device) -> Result<Self, SessionError> {
        let mut backbone = settings.open_backbone(path)?;
        let Some(head) = backbone.classifier.take() else {
            let path = path.to_path_buf();
            return Err(match &backbone.manifest {
                Some(manifest) => {
                    SessionError::NotClassifier { path, method: manifest.plan.recipe.method.title() }
                }
                None => SessionError::NoClassifier { path },
            });
        };
        let train = backbone.manifest.as_ref().map(|manifest| trained_images(&manifest.plan));
        let network = EvaluatedNetwork::from_backbone(backbone, settings, device)?;
        Ok(Self { network, head, train })
    }

    /// Classifies `images`, whose classes have the numbers of the classifier's, as
    /// [`classified_images`](crate::classified_images) numbers them.
    ///
    /// # Errors
    /// [`SessionError::Eval`].
    pub fn score(
        &self,
        images: &ImageSet,
        cache: Option<&FeatureCache>,
        progress: &dyn Progress,
    ) -> Result<Classified, SessionError> {
        Ok(classify(&self.network.network, &self.head, images, cache, progress)?)
    }

    /// Returns the rows that record `classified`, the result on `images`, the main score first; the
    /// classifier comes from `checkpoint`.
    ///
    /// # Errors
    /// [`SessionError::Unserializable`].
    pub fn rows(
        &self,
        classified: &Classified,
        images: &ImageSet,
        checkpoint: &Path,
    ) -> Result<Vec<EvaluationRow>, SessionError> {
        let about = self.network.info(checkpoint)?;
        Ok(classifier_rows(classified, self.train.clone(), images, about))
    }
}

/// Returns the images that the run of `plan` is trained on, as rows of scores state them.
pub(crate) fn trained_images(plan: &Plan) -> ImageSetInfo {
    let set = set_name(&plan.recipe.data.shard_lists());
    ImageSetInfo { set, images: Some(plan.n_samples as usize) }
}
