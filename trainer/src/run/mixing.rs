//! Mixup and cutmix of the images of a batch.
//!
//! The partner of the image at position p of a batch of B is the one at p + B/2: images are in
//! random order, so that this is as good as any other. Of W ranks, each has every W-th image, hence
//! both images of a pair. They are mixed before micro-batches are formed. So a mixed batch is a
//! function of the recipe, the data and its index, whatever the numbers of ranks and micro-batches.

use augment::{Batch, Depth, Mixing, ViewMix};
use rayon::prelude::*;

use crate::error::TrainError;
use crate::recipe::plan::Plan;

/// Mixer of the images of a rank's batches.
#[derive(Debug, Clone, PartialEq)]
pub struct Mixer {
    mixing: Mixing,
    views: ViewMix,
    seed: u64,
    depth: Depth,
}

impl Mixer {
    /// Creates the mixer of the run of `plan`; `None` if its images are not mixed.
    ///
    /// # Errors
    /// [`TrainError::Recipe`] when the method cannot be built.
    pub fn new(plan: &Plan) -> Result<Option<Self>, TrainError> {
        let Some(mixing) = plan.method()?.mixing() else { return Ok(None) };
        let depth = plan.recipe.data.format().depth;
        Ok(Some(Self { mixing, views: plan.view_mix(), seed: plan.recipe.seed, depth }))
    }

    /// Mixes the images of a rank's share of a batch and their labels, or leaves them as they are,
    /// as is drawn for the batch.
    ///
    /// # Panics
    /// If the share has an odd number of images, which [`Plan::for_ranks`] refuses, or no labels.
    pub fn mix(&self, batch: &mut Batch) {
        let n_images = batch.samples.len();
        assert!(n_images.is_multiple_of(2), "{n_images} images form no pairs");
        assert_eq!(batch.labels.len(), n_images, "a label for every image");
        let size_px = self.views.multicrop(self.seed, batch.index).groups()[0].size_px;
        let Some(mixed) = self.mixing.draw(self.seed, batch.index, size_px) else { return };
        let (first, second) = batch.samples.split_at_mut(n_images / 2);
        let pairs = first.par_iter_mut().zip(second.par_iter_mut());
        pairs.for_each(|(first, second)| mixed.mix_views(first, second, self.depth));
        let (first, second) = batch.labels.split_at_mut(n_images / 2);
        for (first, second) in first.iter_mut().zip(second) {
            mixed.mix_labels(first, second);
        }
    }
}
