//! Sizes of a model on a rank: elements of buffers, and bytes of activations.

use networks::layout::ALIGNMENT;

use super::head_rows::OutputPart;
use super::{ModelCost, NetworkCost, Placement, UnitCost};
use crate::step::segments::Segments;

/// Bytes of an f32.
pub(super) const F32: f64 = 4.0;

/// A model on a rank.
#[derive(Clone, Copy)]
pub(super) struct PlacedModel<'a> {
    pub(super) model: &'a ModelCost,
    pub(super) placement: &'a Placement,
}

impl<'a> PlacedModel<'a> {
    /// Units of the trained backbone.
    pub(super) fn backbone(&self) -> &'a [UnitCost] {
        &self.model.trained.backbone
    }

    /// Units of the trained network's heads.
    pub(super) fn heads(&self) -> &'a [UnitCost] {
        &self.model.trained.head
    }

    /// The units of the trained backbone that keep no graph, in segments.
    pub(super) fn segments(&self) -> Segments {
        self.placement.segments(self.backbone())
    }

    /// Returns whether unit `number` of the trained backbone keeps its graph.
    pub(super) fn keeps_graph(&self, number: usize) -> bool {
        number >= self.segments().n_units
    }

    /// Number of images of a step on this rank.
    pub(super) fn n_images(&self) -> f64 {
        self.placement.rank_batch as f64
    }

    /// Number of images of a micro-batch.
    pub(super) fn micro_batch(&self) -> f64 {
        self.n_images() / self.placement.rank_micro_batches.max(1) as f64
    }

    /// Number of elements of the unit's buffer.
    pub(super) fn padded(&self, unit: &UnitCost) -> f64 {
        unit.numel.next_multiple_of(ALIGNMENT * self.placement.group_size) as f64
    }

    /// Number of elements of what this rank computes of the unit.
    pub(super) fn gathered(&self, unit: &UnitCost) -> f64 {
        unit.gathered(self.placement.group_size)
    }

    /// Number of elements of this rank's shard of `unit`.
    pub(super) fn shard(&self, unit: &UnitCost) -> f64 {
        self.padded(unit) / self.placement.group_size as f64
    }

    /// Number of elements of this rank's shards of `network`.
    pub(super) fn shards_of(&self, network: &NetworkCost) -> f64 {
        network.units().map(|unit| self.shard(unit)).sum()
    }

    /// Bytes of the unit's input for all images.
    pub(super) fn input_bytes(&self, unit: &UnitCost) -> f64 {
        unit.input.bytes(self.placement.precision.types()) * self.n_images()
    }

    /// Bytes of all that the unit is given for all images.
    pub(super) fn given_bytes(&self, unit: &UnitCost) -> f64 {
        unit.given.bytes(self.placement.precision.types()) * self.n_images()
    }

    /// Bytes that the first unit of a segment keeps: where every unit keeps its input, those before
    /// a part keep what it shares with them.
    pub(super) fn kept_bytes(&self, unit: &UnitCost) -> f64 {
        if self.placement.segment > 1 { self.given_bytes(unit) } else { self.input_bytes(unit) }
    }

    /// Bytes of the unit's output for `n_images`, by view size and part ([`UnitCost::outputs`]),
    /// with a high number of masked cells.
    pub(super) fn output_bytes(&self, unit: &UnitCost, n_images: f64) -> Vec<Vec<f64>> {
        let types = self.placement.precision.types();
        let of_part = |part: &OutputPart| {
            part.elements.bytes(types) * n_images * self.high_ratio(part.masked_share, n_images)
        };
        unit.outputs.iter().map(|parts| parts.iter().map(of_part).collect()).collect()
    }

    /// Bytes of the unit's graph for `n_images`, with a high number of masked cells.
    pub(super) fn graph_bytes(&self, unit: &UnitCost, n_images: f64) -> f64 {
        let ratio = self.high_ratio(unit.masked_share, n_images);
        unit.graph.bytes(self.placement.precision.types()) * n_images * ratio
    }

    /// Ratio of a high number of rows for `n_images` of the batch to the mean number, where
    /// `masked_share` of the rows are masked cells ([`MaskedCount::high_ratio`]).
    ///
    /// [`MaskedCount::high_ratio`]: networks::mask::MaskedCount::high_ratio
    pub(super) fn high_ratio(&self, masked_share: f64, n_images: f64) -> f64 {
        let Some(masked) = self.model.masked else { return 1.0 };
        let batch_size = (self.placement.rank_batch * self.placement.world_size) as f64;
        1.0 + masked_share * (masked.high_ratio(n_images, batch_size) - 1.0)
    }
}
