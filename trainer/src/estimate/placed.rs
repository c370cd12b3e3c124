//! A model on a rank: the events of a step with their work, elements of buffers, and bytes of
//! activations.

use networks::layout::ALIGNMENT;

use super::Placement;
use crate::cost::{ModelCost, NetworkCost, OutputPart, UnitCost};
use crate::step::schedule::{Event, NetworkUnits, Schedule, StepNetwork};
use crate::step::segments::Segments;

/// Bytes of an f32.
pub(super) const F32: f64 = 4.0;

/// A model on a rank.
#[derive(Clone, Copy)]
pub(super) struct PlacedModel<'a> {
    pub(super) model: &'a ModelCost,
    pub(super) placement: &'a Placement,
}

/// Work of an event for one image.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Work {
    /// Floating-point operations of matrix products.
    pub(super) flops: f64,
    /// Those of them that repeat earlier ones, because a graph was not kept.
    pub(super) repeated_flops: f64,
    /// Elements of activations that are moved through memory.
    pub(super) moved_elements: f64,
}

/// Number of times that a forward pass moves an activation: it is written and read.
const FORWARD_MOVES: f64 = 2.0;

/// Number of times that a backward pass moves an activation or its gradient: the activation is
/// read, its gradient written and read, and the gradient of the next one read.
const BACKWARD_MOVES: f64 = 4.0;

/// Operations of a backward pass in multiples of the forward pass.
const BACKWARD_FLOPS: f64 = 2.0;

impl<'a> PlacedModel<'a> {
    /// Returns the events of a step, in order.
    pub(super) fn events(&self) -> Vec<Event> {
        let others: Vec<NetworkUnits> = self.others().map(n_units).collect();
        let segments = self.segments();
        Schedule::new(&others, n_units(&self.model.trained), segments, self.placement.sharding)
            .events()
            .collect()
    }

    /// Returns the networks without gradients that see views.
    pub(super) fn others(&self) -> impl Iterator<Item = &'a NetworkCost> {
        self.model.others.iter().filter(|network| network.computes())
    }

    /// Returns a network of a step.
    pub(super) fn network(&self, network: StepNetwork) -> &'a NetworkCost {
        match network {
            // Events number the networks that are listed here.
            StepNetwork::Other(number) => self.others().nth(number).expect("a network of the step"),
            StepNetwork::Trained => &self.model.trained,
        }
    }

    /// Returns a unit of a network: those of the backbone come first, then those of the heads.
    pub(super) fn unit(&self, network: StepNetwork, unit: usize) -> &'a UnitCost {
        let network = self.network(network);
        match network.backbone.get(unit) {
            Some(cost) => cost,
            None => &network.head[unit - network.backbone.len()],
        }
    }

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
        Segments::new(self.backbone().len(), self.placement.keep, self.placement.segment)
    }

    /// Returns the work of an event.
    pub(super) fn work(&self, event: Event) -> Work {
        match event {
            Event::Gather { .. } | Event::Reduce { .. } => Work::default(),
            Event::Infer { network, unit } => forward(self.unit(StepNetwork::Other(network), unit)),
            Event::InferHeads { network } => {
                sum_work(self.network(StepNetwork::Other(network)).head.iter().map(forward))
            }
            Event::Forward { unit, .. } => forward(&self.backbone()[unit]),
            Event::Loss => {
                let passes = self.heads().iter().flat_map(|unit| [forward(unit), backward(unit)]);
                sum_work(passes.chain(self.model.units_that_run_twice().map(forward)))
            }
            Event::Repeat { unit } => repeated(&self.backbone()[unit]),
            Event::Backward { unit, recomputes: false } => backward(&self.backbone()[unit]),
            Event::Backward { unit, recomputes: true } => {
                let unit = &self.backbone()[unit];
                sum_work([repeated(unit), backward(unit)].into_iter())
            }
        }
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
    pub(super) fn shards(&self, network: &NetworkCost) -> f64 {
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
        let mut sizes = Vec::with_capacity(unit.outputs.len());
        for parts in &unit.outputs {
            sizes.push(parts.iter().map(|part| self.part_bytes(part, n_images)).collect());
        }
        sizes
    }

    fn part_bytes(&self, part: &OutputPart, n_images: f64) -> f64 {
        let types = self.placement.precision.types();
        part.elements.bytes(types) * n_images * self.high_ratio(part.masked_share, n_images)
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

/// Returns the numbers of units of a network.
fn n_units(network: &NetworkCost) -> NetworkUnits {
    NetworkUnits { n_backbone: network.backbone.len(), n_heads: network.head.len() }
}

/// Returns the work of a unit's forward pass.
fn forward(unit: &UnitCost) -> Work {
    let moved_elements = FORWARD_MOVES * unit.graph.total();
    Work { flops: unit.flops, repeated_flops: 0.0, moved_elements }
}

/// Returns the work of a forward pass that is repeated.
fn repeated(unit: &UnitCost) -> Work {
    Work { repeated_flops: unit.flops, ..forward(unit) }
}

/// Returns the work of a unit's backward pass.
fn backward(unit: &UnitCost) -> Work {
    let moved_elements = BACKWARD_MOVES * unit.graph.total();
    Work { flops: BACKWARD_FLOPS * unit.flops, repeated_flops: 0.0, moved_elements }
}

/// Returns the sum of several pieces of work.
pub(super) fn sum_work(list: impl Iterator<Item = Work>) -> Work {
    let mut sum = Work::default();
    for work in list {
        sum.flops += work.flops;
        sum.repeated_flops += work.repeated_flops;
        sum.moved_elements += work.moved_elements;
    }
    sum
}
