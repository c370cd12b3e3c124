//! Classifiers: networks of runs that have learned from labels, with their heads.

use std::path::Path;

use eval::image_sets::set_name;
use eval::row::{EvaluationRow, ImageSetInfo};
use eval::scores::classifier_row;
use eval::{Classified, FeatureCache, ImageSet, classify};
use kernels::device::Device;
use networks::ClassHead;
use pipeline::Progress;

use crate::error::SessionError;
use crate::evaluated_network::{EvaluatedNetwork, NetworkSettings};
use crate::network::Backbone;

/// A network that was trained to classify images, with its head.
pub struct Classifier {
    /// The network, and its origin.
    pub network: EvaluatedNetwork,
    /// The head, with the names of the classes.
    pub head: ClassHead,
    /// Images that it was trained on.
    train: ImageSetInfo,
}

impl Classifier {
    /// Opens the classifier that the run, or the run of the checkpoint, in `path` has trained, on
    /// `device`.
    ///
    /// # Errors
    /// [`SessionError::NotClassifier`] for a run of another method, [`SessionError::NoHeads`] for
    /// weights, and errors of [`EvaluatedNetwork::open`].
    pub fn open(path: &Path, settings: &NetworkSettings, device: &Device) -> Result<Self, SessionError> {
        let backbone = Backbone::open_with_heads(path)?;
        let Some(manifest) = &backbone.manifest else {
            return Err(SessionError::NoHeads { path: path.to_path_buf() });
        };
        let plan = &manifest.plan;
        let Some(classes) = plan.recipe.method.classes() else {
            let method = plan.recipe.method.title();
            return Err(SessionError::NotClassifier { path: path.to_path_buf(), method });
        };
        let set = set_name(&plan.recipe.data.shard_lists());
        let train = ImageSetInfo { set, images: Some(plan.n_samples as usize) };
        let head = ClassHead::from_tensors(classes.to_vec(), backbone.model.width(), &backbone.tensors)?;
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

    /// Returns the row that records `classified`, the result on `images`; the classifier comes from
    /// `checkpoint`.
    ///
    /// # Errors
    /// [`SessionError::Unserializable`].
    pub fn row(
        &self,
        classified: &Classified,
        images: &ImageSet,
        checkpoint: &Path,
    ) -> Result<EvaluationRow, SessionError> {
        let about = self.network.info(checkpoint)?;
        Ok(classifier_row(classified, self.train.clone(), images, about))
    }
}
