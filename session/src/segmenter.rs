//! Networks of runs that have learned to label pixels, with their decoders.

use std::path::Path;

use eval::row::{EvaluationRow, ImageSetInfo};
use eval::scores::mask_rows;
use eval::{ImageSet, MaskPicture, Segmented, mask_pictures, segment};
use kernels::device::Device;
use networks::PixelHead;
use pipeline::Progress;

use crate::classifier::trained_images;
use crate::error::SessionError;
use crate::evaluated_network::{EvaluatedNetwork, NetworkSettings};

/// A network that was trained to label pixels, with its decoder.
pub struct Segmenter {
    /// The network, and its origin.
    pub network: EvaluatedNetwork,
    /// The decoder, with the names of the classes.
    pub head: PixelHead,
    /// Images that it was trained on; weights do not state them.
    train: Option<ImageSetInfo>,
}

impl Segmenter {
    /// Opens the network with a decoder in `path`, a run, a checkpoint or a file of `ocelli
    /// export`, on `device`.
    ///
    /// # Errors
    /// [`SessionError::NotSegmenter`] for a run of another method, [`SessionError::NoDecoder`] for
    /// other weights, and errors of [`EvaluatedNetwork::open`].
    pub fn open(path: &Path, settings: &NetworkSettings, device: &Device) -> Result<Self, SessionError> {
        let mut backbone = settings.open_backbone(path)?;
        let Some(head) = backbone.decoder.take() else {
            let path = path.to_path_buf();
            return Err(match &backbone.manifest {
                Some(manifest) => {
                    SessionError::NotSegmenter { path, method: manifest.plan.recipe.method.title() }
                }
                None => SessionError::NoDecoder { path },
            });
        };
        let train = backbone.manifest.as_ref().map(|manifest| trained_images(&manifest.plan));
        let network = EvaluatedNetwork::from_backbone(backbone, settings, device)?;
        Ok(Self { network, head, train })
    }

    /// Labels the pixels of `images`, as [`segmented_images`](crate::segmented_images) selects
    /// them.
    ///
    /// # Errors
    /// [`SessionError::Eval`].
    pub fn score(&self, images: &ImageSet, progress: &dyn Progress) -> Result<Segmented, SessionError> {
        Ok(segment(&self.network.network, &self.head, images, progress)?)
    }

    /// Returns the rows that record `segmented`, the result on `images`; the network comes from
    /// `checkpoint`.
    ///
    /// # Errors
    /// [`SessionError::Unserializable`].
    pub fn rows(
        &self,
        segmented: &Segmented,
        images: &ImageSet,
        checkpoint: &Path,
    ) -> Result<Vec<EvaluationRow>, SessionError> {
        let about = self.network.info(checkpoint)?;
        Ok(mask_rows(segmented, &self.head.classes, self.train.clone(), images, about))
    }

    /// Returns pictures of the images `chosen` of `images` with their true and predicted classes.
    ///
    /// # Errors
    /// [`SessionError::Eval`].
    pub fn pictures(&self, images: &ImageSet, chosen: &[usize]) -> Result<Vec<MaskPicture>, SessionError> {
        Ok(mask_pictures(&self.network.network, &self.head, images, chosen)?)
    }
}
