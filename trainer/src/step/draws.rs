//! Random numbers of a step, drawn before it: masks of patches, and dropped branches.

use std::sync::Arc;

use networks::mask::{MaskRule, MaskSampler, MaskedCells};
use networks::sampler::UnitSampler;
use ranks::column_group::ColumnGroup;

use super::batch::{MicroBatch, Share, SlicedImages};
use super::net::Net;
use super::pass::UnitDraws;
use crate::method::Method;

/// The random numbers of one step on one rank.
pub(super) struct StepDraws<'a> {
    /// Method, which sets the rule for masks and the views.
    pub(super) method: &'a dyn Method,
    /// Seed of the run.
    pub(super) seed: u64,
    /// Steps taken.
    pub(super) step: u64,
    /// Images of each micro-batch, by slice.
    pub(super) slices: Vec<SlicedImages>,
    /// Distribution of the images over micro-batches.
    pub(super) share: Share,
    /// Number of images of all ranks.
    pub(super) batch_size: usize,
}

impl StepDraws<'_> {
    /// Marks the cells that the method masks in `batches`, which are listed by pixel input.
    pub(super) fn mask(&self, batches: &mut [Vec<MicroBatch>]) {
        let Some(rule) = self.method.masks() else { return };
        for batches in batches {
            let Some(sampler) = self.mask_sampler(rule, batches) else { continue };
            for (batch, slices) in batches.iter_mut().zip(&self.slices) {
                let mut cells = Vec::with_capacity(slices.len());
                for images in slices {
                    cells.push(sampler.rows(self.positions(images)));
                }
                batch.mask(rule.size, cells);
            }
        }
    }

    /// Draws the masked cells of each micro-batch of `group`, of which `batches` has those of this
    /// rank. Returns an empty list if the method masks no cells, or no rank computes with the
    /// micro-batches of others.
    pub(super) fn group_masks(
        &self,
        batches: &[MicroBatch],
        group: ColumnGroup<'_>,
    ) -> Vec<Arc<MaskedCells>> {
        if group.n_parts() <= 1 {
            return Vec::new();
        }
        let Some(rule) = self.method.masks() else { return Vec::new() };
        let Some(sampler) = self.mask_sampler(rule, batches) else { return Vec::new() };
        let mut masks = Vec::with_capacity(group.n_group());
        for t in 0..group.n_group() {
            let positions = (group.global_index(t)..self.batch_size).step_by(group.n_micro_batches());
            masks.push(Arc::new(sampler.rows(positions.map(|position| position as u64))));
        }
        masks
    }

    /// Returns a sampler of the masks by `rule` for the grid that views have in `batches`, since
    /// sizes may differ from batch to batch.
    fn mask_sampler(&self, rule: MaskRule, batches: &[MicroBatch]) -> Option<MaskSampler> {
        let n_views = self.method.views().groups()[rule.size].n_views;
        let groups = batches.first()?.slices.first()?;
        Some(rule.at(self.seed, self.step, self.batch_size, n_views, groups[rule.size].grid()))
    }

    /// Draws the random numbers of every unit of the backbone of `network`, for views of these
    /// sizes. The parts of a divided unit have those of the undivided unit.
    pub(super) fn unit_draws(&self, network: &Net, sizes: &[usize]) -> Vec<UnitDraws> {
        let groups = self.method.views().groups();
        let n_views = sizes.iter().map(|size| groups[*size].n_views).collect();
        let sampler = UnitSampler { seed: self.seed, step: self.step, batch_size: self.batch_size, n_views };
        let mut unit_draws = Vec::with_capacity(network.backbone.len());
        for (index, unit) in network.undivided.iter().zip(&network.backbone) {
            let drawing = sampler.for_unit(*index, unit.as_ref());
            let mut batches = UnitDraws::with_capacity(self.slices.len());
            for slices in &self.slices {
                batches.push(slices.iter().map(|images| drawing.at(self.positions(images))).collect());
            }
            unit_draws.push(batches);
        }
        unit_draws
    }

    /// Returns the positions of this rank's `images` in the global batch.
    fn positions(&self, images: &[usize]) -> impl Iterator<Item = u64> {
        images.iter().map(|image| self.share.position(*image))
    }
}
