//! Micro-batches of a rank's share of a batch, and the slices of each that workers process.

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
    /// Gradients with respect to the intermediate tensors, in the order of
    /// [`Features::intermediates`].
    pub(crate) intermediates: Vec<Tensor<3>>,
}

impl From<Tensor<3>> for FeatureGrads {
    fn from(x: Tensor<3>) -> Self {
        Self { x, intermediates: Vec::new() }
    }
}

/// Indices of a micro-batch's images, by slice.
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
    /// Selects the views that a network sees.
    pub(crate) fn select_views(&self, seen_views: &[SeenViews]) -> Self {
        let mut slices = Vec::with_capacity(self.slices.len());
        for groups in &self.slices {
            let mut selected = Groups::with_capacity(seen_views.len());
            for views in seen_views {
                let mut group = groups[views.size].clone();
                if let Some(masked) = &mut group.masked {
                    masked.hides = views.masked;
                }
                selected.push(group);
            }
            slices.push(selected);
        }
        Self { slices }
    }

    /// Marks the masked cells of the views of one size, by slice.
    pub(crate) fn mask(&mut self, size: usize, rows: Vec<MaskedCells>) {
        for (groups, rows) in self.slices.iter_mut().zip(rows) {
            groups[size].masked =
                Some(Masked { rows: Arc::new(rows), hides: false, selection: Selection::All });
        }
    }

    /// Concatenates the slices.
    pub(crate) fn concat(&self) -> Groups {
        let n_groups = self.slices.first().map_or(0, Vec::len);
        let mut groups = Groups::with_capacity(n_groups);
        for index in 0..n_groups {
            let mut tensors = Vec::with_capacity(self.slices.len());
            let mut masked_cells = Vec::with_capacity(self.slices.len());
            for slice in &self.slices {
                let group = &slice[index];
                tensors.push(group.x.clone());
                if let Some(masked) = &group.masked {
                    masked_cells.push(&*masked.rows);
                }
            }
            let mut group = self.slices[0][index].with(Tensor::cat(tensors, 0));
            if let Some(masked) = &mut group.masked {
                masked.rows = Arc::new(MaskedCells::concat(masked_cells));
            }
            groups.push(group);
        }
        groups
    }

    /// Splits gradients of the whole micro-batch into those of the slices.
    pub(crate) fn split_gradients(&self, grads: &[Tensor<3>]) -> Vec<GroupGrads> {
        let mut starts = vec![0; grads.len()];
        let mut slices = Vec::with_capacity(self.slices.len());
        for groups in &self.slices {
            let mut slice_grads = GroupGrads::with_capacity(groups.len());
            for (index, (features, grad)) in groups.iter().zip(grads).enumerate() {
                let [b, _, _] = features.x.dims();
                let range = starts[index]..starts[index] + b;
                starts[index] += b;
                slice_grads.push(FeatureGrads::from(grad.clone().slice([range])));
            }
            slices.push(slice_grads);
        }
        slices
    }
}

impl Share {
    /// Returns the images of micro-batch `index` among the `n_images` of this rank: every n-th, so
    /// that the micro-batches of all ranks together are every N-th of the global batch.
    pub(crate) fn images(&self, index: usize, n_images: usize) -> Vec<usize> {
        (index..n_images).step_by(self.n_micro_batches).collect()
    }

    /// Returns the images of each micro-batch, by the slices that `workers` process.
    pub(crate) fn slices(&self, workers: &Workers, n_images: usize) -> Vec<SlicedImages> {
        (0..self.n_micro_batches)
            .map(|index| {
                let images = self.images(index, n_images);
                let ranges = workers.slices(images.len());
                ranges.into_iter().map(|range| images[range].to_vec()).collect()
            })
            .collect()
    }

    /// Returns the position of this rank's image `image` in the global batch.
    pub(crate) fn position(&self, image: usize) -> u64 {
        (image * self.topology.world_size + self.topology.data_rank()) as u64
    }
}
