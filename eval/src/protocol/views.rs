//! Features of random crops, drawn anew in every pass, for the protocols that want them.

use std::sync::mpsc::sync_channel;

use augment::{Interpolation, MultiCrop, ViewRng};
use networks::Network;
use rayon::prelude::*;

use crate::EvalError;
use crate::features::columns::Wanted;
use crate::features::extract::{batch_of, check_finite, rows_of};
use crate::features::table::Table;
use crate::images::ImageSet;

/// Keeps the order of images apart from all other streams.
const ORDER_DOMAIN: u64 = 0x7669_6577_0000_0000;

/// Images whose views a network makes features of.
pub struct Views<'a> {
    network: &'a Network,
    images: &'a ImageSet,
    wanted: Wanted,
}

/// Random-resized crops and flips of images, as torchvision's `RandomResizedCrop` and `RandomHorizontalFlip` make them by
/// default but for the interpolation.
pub(super) struct Crops<'a> {
    of: &'a Views<'a>,
    multicrop: MultiCrop,
}

/// An image in a pass over all of them.
type Item = (u64, u32);

/// Images of a mini-batch that can be decoded: their numbers, classes and pixels.
#[derive(Default)]
struct Made {
    numbers: Vec<u32>,
    labels: Vec<u32>,
    views: Vec<Vec<u8>>,
}

impl<'a> Views<'a> {
    /// The images of `images`, seen by `network`.
    pub fn new(network: &'a Network, images: &'a ImageSet, wanted: Wanted) -> Self {
        Self { network, images, wanted }
    }

    /// Images of a pass.
    pub(super) fn len(&self) -> usize {
        self.images.len()
    }

    /// Crops that are resized by `interpolation`.
    pub(super) fn crops(&'a self, interpolation: Interpolation) -> Crops<'a> {
        let mut multicrop = MultiCrop::single(self.images.transform.size_px);
        multicrop.crops.iter_mut().for_each(|crop| crop.interpolation = interpolation);
        Crops { of: self, multicrop }
    }
}

impl Crops<'_> {
    /// Calls `f` with the features and the classes of each mini-batch of the pass `epoch`; the last one may be short.
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

    /// Calls `f` with the features and the classes of `n_batches` whole mini-batches, which go on from pass to pass.
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

    /// All images in the order of a pass.
    fn order(&self, seed: u64, pass: u64) -> impl Iterator<Item = Item> + use<> {
        let mut order: Vec<u32> = (0..self.of.images.len() as u32).collect();
        ViewRng::from_words([seed, ORDER_DOMAIN, pass, 0]).shuffle(&mut order);
        order.into_iter().map(move |number| (pass, number))
    }

    /// Makes the features of `batches`; the next one is decoded while the network computes.
    fn batches(
        &self,
        seed: u64,
        batches: impl Iterator<Item = Vec<Item>> + Send,
        f: &mut dyn FnMut(&Table, &[u32]),
    ) -> Result<(), EvalError> {
        let (sender, made) = sync_channel(1);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for items in batches {
                    if sender.send(self.make(seed, &items)).is_err() {
                        return;
                    }
                }
            });
            for made in made {
                let Made { numbers, labels, views } = made?;
                if numbers.is_empty() {
                    continue;
                }
                let table = self.table(numbers, &views)?;
                f(&table, &labels);
            }
            Ok(())
        })
    }

    fn make(&self, seed: u64, items: &[Item]) -> Result<Made, EvalError> {
        let images = self.of.images;
        let view = |(pass, number): &Item| images.views(*number as usize, &self.multicrop, [seed, *pass]);
        let views: Result<Vec<_>, EvalError> = items.par_iter().map(view).collect();
        let mut made = Made::default();
        for ((_, number), view) in items.iter().zip(views?) {
            if let (Some(mut view), Some(label)) = (view, images.label(*number as usize)) {
                made.labels.push(label);
                made.numbers.push(*number);
                made.views.push(view.remove(0));
            }
        }
        Ok(made)
    }

    /// Rows of `views`, of as many at a time as features are extracted of.
    fn table(&self, numbers: Vec<u32>, views: &[Vec<u8>]) -> Result<Table, EvalError> {
        let size_px = self.of.images.transform.size_px as usize;
        let (mut columns, mut rows) = (None, Vec::new());
        for views in views.chunks(batch_of(self.of.network, size_px)) {
            let views: Vec<&[u8]> = views.iter().map(Vec::as_slice).collect();
            let (found, of_views) = rows_of(self.of.network, &views, size_px, self.of.wanted);
            columns = Some(found);
            rows.extend(of_views);
        }
        check_finite(self.of.images, &numbers, &rows)?;
        // There is a view for each number, and at least one.
        let columns = columns.expect("a mini-batch that is not empty");
        Ok(Table::new(columns, numbers, rows))
    }
}
