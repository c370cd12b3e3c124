//! A rank's share of a batch: micro-batches, and the slices of each that workers process.

use std::sync::Arc;

use burn_tensor::Tensor;
use kernels::device::workers::Workers;
use networks::features::{Features, Masked, Selection};
use networks::mask::MaskedCells;
use ranks::topology::Topology;

use crate::method::network::SeenViews;

/// Features of some images, by view size.
pub(crate) type Groups = Vec<Features>;

/// Gradients of [`Groups`].
pub(crate) type GroupGrads = Vec<FeatureGrads>;

/// Gradients of features.
#[derive(Debug, Clone)]
pub(crate) struct FeatureGrads {
    /// Gradient with respect to the features themselves.
    pub(crate) x: Tensor<3>,
    /// Gradients with respect to the tensors beside them, in the order of [`Features::beside`].
    pub(crate) beside: Vec<Tensor<3>>,
}

impl From<Tensor<3>> for FeatureGrads {
    fn from(x: Tensor<3>) -> Self {
        Self { x, beside: Vec::new() }
    }
}

/// Numbers of a micro-batch's images, by slice.
pub(crate) type SlicedImages = Vec<Vec<usize>>;

/// A micro-batch: one slice per worker.
#[derive(Debug, Clone, Default)]
pub(crate) struct MicroBatch {
    /// Slices in the order of their images.
    pub(crate) slices: Vec<Groups>,
}

/// Distribution of the images of a rank's share over micro-batches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Share {
    /// Number of micro-batches of this rank.
    pub(crate) n_micro_batches: usize,
    pub(crate) topology: Topology,
}

impl MicroBatch {
    /// Selects the views of `sees`.
    pub(crate) fn seen(&self, sees: &[SeenViews]) -> Self {
        let as_seen = |groups: &Groups, sight: &SeenViews| {
            let mut group = groups[sight.size].clone();
            group.masked.iter_mut().for_each(|masked| masked.hides = sight.masked);
            group
        };
        Self {
            slices: self
                .slices
                .iter()
                .map(|groups| sees.iter().map(|sight| as_seen(groups, sight)).collect())
                .collect(),
        }
    }

    /// Marks the masked cells of the views of one size, by slice.
    pub(crate) fn mask(&mut self, size: usize, rows: Vec<MaskedCells>) {
        for (groups, rows) in self.slices.iter_mut().zip(rows) {
            groups[size].masked =
                Some(Masked { rows: Arc::new(rows), hides: false, selection: Selection::All });
        }
    }

    /// Joins the slices into the whole micro-batch.
    pub(crate) fn joined(&self) -> Groups {
        let n_groups = self.slices.first().map_or(0, Vec::len);
        (0..n_groups)
            .map(|group: usize| {
                let parts = || self.slices.iter().map(|slice| &slice[group]);
                let all = parts().map(|part| part.x.clone()).collect();
                let mut whole = self.slices[0][group].with(Tensor::cat(all, 0));
                if let Some(masked) = &mut whole.masked {
                    let rows = parts().filter_map(|part| part.masked.as_ref()).map(|masked| &*masked.rows);
                    masked.rows = Arc::new(MaskedCells::concat(rows));
                }
                whole
            })
            .collect()
    }

    /// Cuts gradients of the whole micro-batch into slices.
    pub(crate) fn sliced(&self, grads: Vec<Tensor<3>>) -> Vec<GroupGrads> {
        let mut starts = vec![0; grads.len()];
        self.slices
            .iter()
            .map(|groups| {
                groups
                    .iter()
                    .zip(&grads)
                    .zip(&mut starts)
                    .map(|((features, grad), start)| {
                        let [b, _, _] = features.x.dims();
                        let range = *start..*start + b;
                        *start += b;
                        grad.clone().slice([range]).into()
                    })
                    .collect()
            })
            .collect()
    }
}

impl Share {
    /// Images of micro-batch `number` among the `n_images` of this rank: every n-th, so that the
    /// micro-batches of all ranks together are every N-th of the global batch.
    pub(crate) fn images(&self, number: usize, n_images: usize) -> Vec<usize> {
        (number..n_images).step_by(self.n_micro_batches).collect()
    }

    /// The images of each micro-batch, by the slices that `workers` process.
    pub(crate) fn slices(&self, workers: &Workers, n_images: usize) -> Vec<SlicedImages> {
        (0..self.n_micro_batches)
            .map(|number| {
                let images = self.images(number, n_images);
                let ranges = workers.slices(images.len());
                ranges.into_iter().map(|range| images[range].to_vec()).collect()
            })
            .collect()
    }

    /// Position of this rank's image `image` in the global batch.
    pub(crate) fn position(&self, image: usize) -> u64 {
        (image * self.topology.world_size + self.topology.data_rank()) as u64
    }
}
