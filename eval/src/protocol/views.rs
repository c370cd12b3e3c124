//! Features of random crops, drawn anew in every pass, for the protocols that train on them.

use std::sync::mpsc::sync_channel;

use augment::{Interpolation, MultiCrop, ViewRng};
use networks::Network;
use rayon::prelude::*;

use crate::EvalError;
use crate::features::columns::FeatureKind;
use crate::features::extract::{batch_size, check_finite, compute_rows};
use crate::features::table::Table;
use crate::images::ImageSet;
use crate::parallel::try_collect;

/// RNG domain of the shuffles, distinct from all other streams.
const ORDER_DOMAIN: u64 = 0x7669_6577_0000_0000;

/// Training images and the network that computes features of their views.
pub struct Views<'a> {
    network: &'a Network,
    images: &'a ImageSet,
    wanted: FeatureKind,
}

/// Random-resized crops and flips of images, with the defaults of torchvision's `RandomResizedCrop`
/// and `RandomHorizontalFlip` except for the interpolation.
pub(super) struct Crops<'a> {
    views: &'a Views<'a>,
    multicrop: MultiCrop,
}

/// Pass and index of an image.
type Item = (u64, u32);

/// Decoded views of a mini-batch: indices, classes and pixels of the images that can be decoded.
#[derive(Default)]
struct DecodedBatch {
    indices: Vec<u32>,
    labels: Vec<u32>,
    views: Vec<Vec<u8>>,
}

impl<'a> Views<'a> {
    /// Returns the views of `images` for `network`.
    pub fn new(network: &'a Network, images: &'a ImageSet, wanted: FeatureKind) -> Self {
        Self { network, images, wanted }
    }

    /// Returns the number of images per pass.
    pub(super) fn len(&self) -> usize {
        self.images.len()
    }

    /// Returns crops that are resized by `interpolation`.
    pub(super) fn crops(&'a self, interpolation: Interpolation) -> Crops<'a> {
        let mut multicrop = MultiCrop::single(self.images.transform.size_px);
        for crop in &mut multicrop.crops {
            crop.interpolation = interpolation;
        }
        Crops { views: self, multicrop }
    }
}

impl Crops<'_> {
    /// Calls `f` with the features and the classes of each mini-batch of pass `epoch`; the last one
    /// may be smaller.
    pub(super) fn epoch(
        &self,
        seed: u64,
        epoch: usize,
        batch: usize,
        f: &mut dyn FnMut(&Table, &[u32]),
    ) -> Result<(), EvalError> {
        let items: Vec<Item> = self.order(seed, epoch as u64).collect();
        self.batches(seed, items.chunks(batch).map(<[Item]>::to_vec), f)
    }

    /// Calls `f` with the features and the classes of `n_batches` mini-batches of `batch` images,
    /// which may span passes.
    pub(super) fn stream(
        &self,
        seed: u64,
        batch: usize,
        n_batches: usize,
        f: &mut dyn FnMut(&Table, &[u32]),
    ) -> Result<(), EvalError> {
        let mut items = (0..).flat_map(|pass| self.order(seed, pass));
        self.batches(seed, (0..n_batches).map(|_| items.by_ref().take(batch).collect()), f)
    }

    /// Returns all images in the order of a pass.
    fn order(&self, seed: u64, pass: u64) -> impl Iterator<Item = Item> + use<> {
        let mut order: Vec<u32> = (0..self.views.images.len() as u32).collect();
        ViewRng::from_words([seed, ORDER_DOMAIN, pass, 0]).shuffle(&mut order);
        order.into_iter().map(move |image| (pass, image))
    }

    /// Calls `f` with the features of each batch; the next one is decoded while the network
    /// computes.
    fn batches(
        &self,
        seed: u64,
        batches: impl Iterator<Item = Vec<Item>> + Send,
        f: &mut dyn FnMut(&Table, &[u32]),
    ) -> Result<(), EvalError> {
        let (sender, decoded) = sync_channel(1);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for items in batches {
                    if sender.send(self.decode(seed, &items)).is_err() {
                        return;
                    }
                }
            });
            for batch in decoded {
                let DecodedBatch { indices, labels, views } = batch?;
                if indices.is_empty() {
                    continue;
                }
                let table = self.table(indices, &views)?;
                f(&table, &labels);
            }
            Ok(())
        })
    }

    /// Decodes the images of `items` and draws a view of each.
    fn decode(&self, seed: u64, items: &[Item]) -> Result<DecodedBatch, EvalError> {
        let images = self.views.images;
        let views = try_collect(
            items.par_iter().map(|(pass, image)| images.views(*image as usize, &self.multicrop, seed, *pass)),
        )?;
        let mut batch = DecodedBatch::default();
        for ((_, image), groups) in items.iter().zip(views) {
            if let (Some(mut groups), Some(label)) = (groups, images.label(*image as usize)) {
                batch.labels.push(label);
                batch.indices.push(*image);
                batch.views.push(groups.remove(0));
            }
        }
        Ok(batch)
    }

    /// Computes the rows of `views`, in batches of the size that feature extraction uses.
    fn table(&self, indices: Vec<u32>, views: &[Vec<u8>]) -> Result<Table, EvalError> {
        let Views { network, images, wanted } = *self.views;
        let size_px = images.transform.size_px as usize;
        let mut columns = None;
        let mut rows = Vec::new();
        for views in views.chunks(batch_size(network, size_px)) {
            let views: Vec<&[u8]> = views.iter().map(Vec::as_slice).collect();
            let (batch_columns, batch_rows) = compute_rows(network, &views, size_px, wanted);
            columns = Some(batch_columns);
            rows.extend(batch_rows);
        }
        check_finite(images, &indices, &rows)?;
        // `batches` skips empty mini-batches, so that there is at least one view.
        let columns = columns.expect("a mini-batch that is not empty");
        Ok(Table::new(columns, indices, rows))
    }
}
