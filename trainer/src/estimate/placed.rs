//! Sizes of a model on a rank: elements of buffers, and bytes of activations.

use networks::layout::ALIGNMENT;
use networks::unit::Elements;

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

    /// Bytes that the first unit of a segment keeps: where every unit keeps its input, those before a part keep what it shares with them.
    pub(super) fn kept_bytes(&self, unit: &UnitCost) -> f64 {
        if self.placement.segment > 1 { self.given_bytes(unit) } else { self.input_bytes(unit) }
    }

    /// Bytes of the unit's output for `n_images`, by view size and part ([`UnitCost::outputs`]).
    pub(super) fn output_bytes(&self, unit: &UnitCost, n_images: f64) -> Vec<Vec<f64>> {
        let types = self.placement.precision.types();
        let of_size = |parts: &Vec<Elements>| parts.iter().map(|part| part.bytes(types) * n_images).collect();
        unit.outputs.iter().map(of_size).collect()
    }

    /// Bytes of the unit's graph for `n_images`.
    pub(super) fn graph_bytes(&self, unit: &UnitCost, n_images: f64) -> f64 {
        unit.graph.bytes(self.placement.precision.types()) * n_images
    }
}
