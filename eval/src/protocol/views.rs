//! Features of augmented views, made anew in every epoch, for the protocols that want them.

use augment::{Interpolation, MultiCrop, ViewRng};
use rayon::prelude::*;
use trainer::Network;

use crate::EvalError;
use crate::features::columns::Wanted;
use crate::features::extract::{check_finite, rows_of};
use crate::features::table::Table;
use crate::images::ImageSet;

/// Keeps the order of images apart from all other streams.
const ORDER_DOMAIN: u64 = 0x7669_6577_0000_0000;

/// Images whose views a network makes features of.
pub struct Views<'a> {
    network: &'a Network,
    images: &'a ImageSet,
    wanted: Wanted,
    multicrop: MultiCrop,
}

impl<'a> Views<'a> {
    /// Random-resized crops and flips of `images`, as torchvision's `RandomResizedCrop` and `RandomHorizontalFlip` make
    /// them by default.
    pub fn new(network: &'a Network, images: &'a ImageSet, wanted: Wanted) -> Self {
        let mut multicrop = MultiCrop::single(images.transform.size_px);
        multicrop.crops.iter_mut().for_each(|crop| crop.interpolation = Interpolation::Bilinear);
        Self { network, images, wanted, multicrop }
    }

    /// Images of an epoch.
    pub(super) fn len(&self) -> usize {
        self.images.len()
    }

    /// Calls `f` with the features and the classes of each mini-batch of `epoch`: a view of every image that has a class
    /// and can be decoded.
    pub(super) fn epoch(
        &self,
        seed: u64,
        epoch: usize,
        batch: usize,
        f: &mut dyn FnMut(&Table, &[u32]),
    ) -> Result<(), EvalError> {
        let mut order: Vec<u32> = (0..self.images.len() as u32).collect();
        ViewRng::from_words([seed, ORDER_DOMAIN, epoch as u64, 0]).shuffle(&mut order);
        for numbers in order.chunks(batch) {
            let make =
                |number: &u32| self.images.views(*number as usize, &self.multicrop, [seed, epoch as u64]);
            let made: Result<Vec<_>, EvalError> = numbers.par_iter().map(make).collect();
            let (mut labels, mut there, mut views) = (Vec::new(), Vec::new(), Vec::new());
            for (number, view) in numbers.iter().zip(made?) {
                if let (Some(mut view), Some(label)) = (view, self.images.label(*number as usize)) {
                    labels.push(label);
                    there.push(*number);
                    views.push(view.remove(0));
                }
            }
            if !views.is_empty() {
                let views: Vec<&[u8]> = views.iter().map(Vec::as_slice).collect();
                let size_px = self.images.transform.size_px as usize;
                let (columns, rows) = rows_of(self.network, &views, size_px, self.wanted);
                check_finite(self.images, &there, &rows)?;
                f(&Table::new(columns, there, rows), &labels);
            }
        }
        Ok(())
    }
}
