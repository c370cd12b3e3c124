//! Random numbers of a step, drawn before it: masks of patches, and branches that are dropped.

use std::sync::Arc;

use networks::mask::{MaskRule, MaskSampler, MaskedCells};
use networks::sampler::UnitSampler;
use ranks::column_group::ColumnGroup;

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
        for batches in batches {
            let Some(drawing) = self.masks(rule, batches) else { continue };
            for (batch, slices) in batches.iter_mut().zip(&self.slices) {
                let of_slice = |images: &Vec<usize>| {
                    drawing.rows(images.iter().map(|image| self.share.position(*image)))
                };
                batch.mask(rule.size, slices.iter().map(of_slice).collect());
            }
        }
    }

    /// Draws the masked cells of each micro-batch of `group`, of which `batches` has those of this
    /// rank; none where the method masks no cells, or no rank computes with the micro-batches of
    /// others.
    pub(super) fn group_masks(
        &self,
        batches: &[MicroBatch],
        group: ColumnGroup<'_>,
    ) -> Vec<Arc<MaskedCells>> {
        let rule = self.method.masks().filter(|_| group.n_parts() > 1);
        let Some(drawing) = rule.and_then(|rule| self.masks(rule, batches)) else { return Vec::new() };
        (0..group.n_group())
            .map(|t: usize| {
                let positions = (group.number(t)..self.batch_size).step_by(group.n_micro_batches());
                Arc::new(drawing.rows(positions.map(|position| position as u64)))
            })
            .collect()
    }

    /// Prepares the masks by `rule` for the grid that views have in `batches`: sizes may differ
    /// from batch to batch.
    fn masks(&self, rule: MaskRule, batches: &[MicroBatch]) -> Option<MaskSampler> {
        let n_views = self.method.views().groups()[rule.size].n_views;
        let groups = batches.first()?.slices.first()?;
        Some(rule.at(self.seed, self.step, self.batch_size, n_views, groups[rule.size].grid))
    }

    /// Random numbers of every unit of the backbone of `network`, for views of these sizes: those
    /// of the undivided unit for its parts.
    pub(super) fn units(&self, network: &Net, sizes: &[usize]) -> Vec<UnitDraws> {
        let groups = self.method.views().groups();
        let n_views = sizes.iter().map(|size| groups[*size].n_views).collect();
        let drawing = UnitSampler { seed: self.seed, step: self.step, batch_size: self.batch_size, n_views };
        network
            .undivided
            .iter()
            .zip(network.backbone.iter().map(AsRef::as_ref))
            .map(|(number, unit)| {
                let drawing = drawing.for_unit(*number, unit);
                let of_slice =
                    |images: &Vec<usize>| drawing.at(images.iter().map(|image| self.share.position(*image)));
                self.slices.iter().map(|slices| slices.iter().map(of_slice).collect()).collect()
            })
            .collect()
    }
}
