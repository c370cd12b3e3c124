//! Random numbers of a step, drawn before it: masks of patches, and branches that are dropped.

use networks::sampler::UnitSampler;
use networks::unit::Unit;

use super::batch::{MicroBatch, Share, SlicedImages};
use super::net::Net;
use super::pass::UnitDraws;
use crate::method::Method;

/// The random numbers of one step on one rank.
pub(super) struct Drawn<'a> {
    pub(super) method: &'a dyn Method,
    /// Seed of the run.
    pub(super) seed: u64,
    /// Steps taken.
    pub(super) step: u64,
    /// Images of each micro-batch, by slice.
    pub(super) slices: Vec<SlicedImages>,
    pub(super) share: Share,
    /// Number of images of all ranks.
    pub(super) batch_size: usize,
}

impl Drawn<'_> {
    /// Marks the cells that the method masks in `batches`, which are listed by pixel input.
    pub(super) fn mask(&self, batches: &mut [Vec<MicroBatch>]) {
        let Some(rule) = self.method.masks() else { return };
        let group = self.method.views().groups()[rule.size];
        for batches in batches {
            // Sizes may differ from batch to batch.
            let Some(groups) = batches.first().and_then(|batch| batch.slices.first()) else { continue };
            let grid = groups[rule.size].grid;
            let drawing = rule.at(self.seed, self.step, self.batch_size, group.n_views, grid);
            for (batch, slices) in batches.iter_mut().zip(&self.slices) {
                let of_slice = |images: &Vec<usize>| {
                    drawing.rows(images.iter().map(|image| self.share.position(*image)))
                };
                batch.mask(rule.size, slices.iter().map(of_slice).collect());
            }
        }
    }

    /// Random numbers of every unit of the backbone of `network`, for views of these sizes: those of the undivided unit for its parts.
    pub(super) fn units(&self, network: &Net, sizes: &[usize]) -> Vec<UnitDraws> {
        let groups = self.method.views().groups();
        let n_views = sizes.iter().map(|size| groups[*size].n_views).collect();
        let drawing = UnitSampler { seed: self.seed, step: self.step, batch_size: self.batch_size, n_views };
        let of_unit = |(number, unit): (&usize, &dyn Unit)| {
            let drawing = drawing.of_unit(*number, unit);
            let of_slice =
                |images: &Vec<usize>| drawing.at(images.iter().map(|image| self.share.position(*image)));
            self.slices.iter().map(|slices| slices.iter().map(of_slice).collect()).collect()
        };
        network.undivided.iter().zip(network.backbone.iter().map(AsRef::as_ref)).map(of_unit).collect()
    }
}
