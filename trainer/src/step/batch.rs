//! Micro-batches of a rank's share of a batch, and the slices of each that workers process.

use std::sync::Arc;

use burn_tensor::Tensor;
use kernels::device::workers::Workers;
use networks::mask::{MaskedCells, Masking};
use networks::tokens::{Masked, Tokens};
use ranks::topology::Topology;

use crate::method::network::SeenViews;

/// Tokens of some images, in streams that together have the views of all sizes in their order.
pub(crate) type Streams = Vec<Tokens>;

/// Gradients of [`Streams`].
pub(crate) type StreamGrads = Vec<TokenGrads>;

/// Gradients of a stream of tokens.
#[derive(Debug, Clone)]
pub(crate) struct TokenGrads {
    /// Gradient with respect to the values, `[T, D]`.
    pub(crate) x: Tensor<2>,
    /// Gradients with respect to the intermediate tensors, in the order of
    /// [`Tokens::intermediates`].
    pub(crate) intermediates: Vec<Tensor<2>>,
}

impl From<Tensor<2>> for TokenGrads {
    fn from(x: Tensor<2>) -> Self {
        Self { x, intermediates: Vec::new() }
    }
}

/// Indices of a micro-batch's images, by slice.
pub(crate) type SlicedImages = Vec<Vec<usize>>;

/// A micro-batch: one slice per worker.
#[derive(Debug, Clone, Default)]
pub(crate) struct MicroBatch {
    /// Slices in the order of their images.
    pub(crate) slices: Vec<Streams>,
}

/// Distribution of the images of a rank's share over micro-batches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Share {
    /// Number of micro-batches of this rank.
    pub(crate) n_micro_batches: usize,
    pub(crate) topology: Topology,
}

impl MicroBatch {
    /// Selects the views that a network sees, of slices that have one stream for each size.
    pub(crate) fn select_views(&self, seen_views: &[SeenViews]) -> Self {
        let mut slices = Vec::with_capacity(self.slices.len());
        for streams in &self.slices {
            let mut selected = Streams::with_capacity(seen_views.len());
            for views in seen_views {
                let mut tokens = streams[views.size].clone();
                for group in &mut tokens.groups {
                    if let Some(masked) = &mut group.masked {
                        masked.masking = views.masking;
                    }
                }
                selected.push(tokens);
            }
            slices.push(selected);
        }
        Self { slices }
    }

    /// Marks the masked cells of the views of one size, by slice.
    pub(crate) fn mask(&mut self, size: usize, rows: Vec<MaskedCells>) {
        for (streams, rows) in self.slices.iter_mut().zip(rows) {
            let masked = Masked { rows: Arc::new(rows), masking: Masking::Shown };
            streams[size].groups[0].masked = Some(masked);
        }
    }

    /// Concatenates the slices, by size of view: one stream for each.
    pub(crate) fn concat(&self) -> Streams {
        let slices: Vec<Streams> = self.slices.iter().map(|streams| split_sizes(streams)).collect();
        let n_sizes = slices.first().map_or(0, Vec::len);
        let mut sizes = Streams::with_capacity(n_sizes);
        for index in 0..n_sizes {
            let parts: Vec<Tokens> = slices.iter().map(|slice| slice[index].clone()).collect();
            sizes.push(Tokens::concat(&parts));
        }
        sizes
    }

    /// Splits gradients of the whole micro-batch, by size of view, into those of the slices and
    /// their streams.
    pub(crate) fn split_gradients(&self, grads: &[Tensor<2>]) -> Vec<StreamGrads> {
        let mut starts = vec![0; grads.len()];
        let mut slices = Vec::with_capacity(self.slices.len());
        for streams in &self.slices {
            let mut size = 0;
            let mut slice_grads = StreamGrads::with_capacity(streams.len());
            for tokens in streams {
                let mut parts = Vec::with_capacity(tokens.groups.len());
                for part in tokens.split_sizes() {
                    let range = starts[size]..starts[size] + part.x.dims()[0];
                    starts[size] = range.end;
                    parts.push(grads[size].clone().slice([range]));
                    size += 1;
                }
                let x = if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 0) };
                slice_grads.push(TokenGrads::from(x));
            }
            slices.push(slice_grads);
        }
        slices
    }
}

/// Returns one stream for each size of views in `streams`.
pub(super) fn split_sizes(streams: &[Tokens]) -> Streams {
    streams.iter().flat_map(Tokens::split_sizes).collect()
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

    /// Distributes `items`, one for each image of this rank, over its micro-batches as
    /// [`Share::images`] does: empty lists if there are none.
    pub(crate) fn split<T: Clone>(&self, items: Vec<T>) -> Vec<Vec<T>> {
        let mut micro_batches = vec![Vec::new(); self.n_micro_batches];
        for (image, item) in items.into_iter().enumerate() {
            micro_batches[image % self.n_micro_batches].push(item);
        }
        micro_batches
    }

    /// Returns the position of this rank's image `image` in the global batch.
    pub(crate) fn position(&self, image: usize) -> u64 {
        (image * self.topology.world_size + self.topology.data_rank()) as u64
    }
}

#[cfg(test)]
mod tests {
    use augment::SoftLabel;

    use super::*;

    /// Labels go with their images.
    #[test]
    fn labels_are_those_of_the_images_of_their_micro_batch() {
        let labels: Vec<SoftLabel> = (0..8).map(|class| vec![(class, 1.0)]).collect();
        for n_micro_batches in [1, 2, 4] {
            let share = Share { n_micro_batches, topology: Topology::SINGLE_RANK };
            let split = share.split(labels.clone());
            assert_eq!(split.len(), n_micro_batches);
            for (index, split) in split.iter().enumerate() {
                let images = share.images(index, labels.len());
                let expected: Vec<SoftLabel> = images.iter().map(|image| labels[*image].clone()).collect();
                assert_eq!(*split, expected);
            }
            assert_eq!(share.split(Vec::<SoftLabel>::new()), vec![Vec::<SoftLabel>::new(); n_micro_batches]);
        }
    }
}
