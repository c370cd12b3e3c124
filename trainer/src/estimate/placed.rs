//! A model on a rank: the events of a step with their work, elements of buffers, and bytes of
//! activations.

use networks::layout::ALIGNMENT;
use networks::unit::Elements;

use super::Placement;
use crate::cost::{ModelCost, NetworkCost, OutputPart, UnitCost};
use crate::step::events::{Event, NetworkUnits, Schedule, StepNetwork};
use crate::step::segments::Segments;

/// Bytes of an f32.
pub(super) const F32: f64 = 4.0;

/// A model on a rank.
#[derive(Clone, Copy)]
pub(super) struct PlacedModel<'a> {
    pub(super) model: &'a ModelCost,
    pub(super) placement: &'a Placement,
}

/// Work for one image.
#[derive(Default)]
pub(super) struct Work {
    /// Floating-point operations of matrix products.
    pub(super) flops: f64,
    /// Elements of activations that are moved through memory.
    pub(super) moved_elements: f64,
}

impl Work {
    /// Adds passes of a unit. A forward pass writes and reads each activation; a backward pass
    /// reads it, writes and reads its gradient, and reads the gradient of the next one.
    fn add(&mut self, unit: &UnitCost, n_forward: f64, n_backward: f64) {
        self.flops += (n_forward + 2.0 * n_backward) * unit.flops;
        self.moved_elements += (2.0 * n_forward + 4.0 * n_backward) * unit.graph.total();
    }
}

impl<'a> PlacedModel<'a> {
    /// Returns the events of a step, in order.
    pub(super) fn events(&self) -> Vec<Event> {
        let others: Vec<NetworkUnits> = self.others().map(n_units).collect();
        let segments = self.segments();
        let mut fixed = Vec::new();
        for (index, unit) in self.model.trained.backbone.iter().enumerate() {
            if unit.n_adapters == Some(0) {
                fixed.push(index);
            }
        }
        Schedule::new(&others, n_units(&self.model.trained), segments, self.placement.sharding)
            .without_gradients(&fixed)
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
            StepNetwork::Other(index) => self.others().nth(index).expect("a network of the step"),
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

    /// Returns whether a unit of a network is one of its backbone.
    pub(super) fn is_backbone(&self, network: StepNetwork, unit: usize) -> bool {
        unit < self.network(network).backbone.len()
    }

    /// The units of the trained backbone that keep no graph, in segments.
    pub(super) fn segments(&self) -> Segments {
        let n_backbone = self.model.trained.backbone.len();
        let segments = Segments::new(n_backbone, self.placement.keep, self.placement.segment);
        segments.after_fixed(self.model.n_fixed)
    }

    /// Returns the work of events.
    pub(super) fn work(&self, events: &[Event]) -> Work {
        let NetworkCost { backbone, head, .. } = &self.model.trained;
        let mut work = Work::default();
        for event in events {
            match *event {
                Event::Gather { .. } | Event::Reduce { .. } => {}
                Event::Infer { network, unit } => {
                    work.add(self.unit(StepNetwork::Other(network), unit), 1.0, 0.0);
                }
                Event::InferHeads { network } => {
                    for unit in &self.network(StepNetwork::Other(network)).head {
                        work.add(unit, 1.0, 0.0);
                    }
                }
                Event::Loss => {
                    for unit in head {
                        work.add(unit, 1.0 + f64::from(unit.runs_twice), 1.0);
                        if self.placement.is_gpu {
                            // Those of a forward and a backward pass, as in `Work::add`.
                            work.moved_elements += 6.0 * unit.loss_elements;
                        }
                    }
                }
                Event::Forward { unit, .. } | Event::Repeat { unit } => work.add(&backbone[unit], 1.0, 0.0),
                Event::Backward { unit, recomputes } => {
                    work.add(&backbone[unit], f64::from(recomputes), 1.0);
                }
            }
        }
        work
    }

    /// Number of images of a step on this rank.
    pub(super) fn n_images(&self) -> f64 {
        self.placement.rank_batch as f64
    }

    /// Number of images of a micro-batch.
    pub(super) fn micro_batch(&self) -> f64 {
        self.n_images() / self.placement.rank_micro_batches.max(1) as f64
    }

    /// Number of elements of the buffer of the unit's parameters, without adapters.
    pub(super) fn padded(&self, unit: &UnitCost) -> f64 {
        self.padded_numel(unit.numel)
    }

    /// Number of elements of the buffer of the unit's adapters; 0 if it has none.
    pub(super) fn adapters(&self, unit: &UnitCost) -> f64 {
        self.padded_numel(unit.n_adapters.unwrap_or_default())
    }

    /// Number of elements of the gradient that this rank computes of the unit.
    pub(super) fn gradient(&self, unit: &UnitCost) -> f64 {
        self.padded_numel(unit.n_trained()) / unit.n_parts as f64
    }

    fn padded_numel(&self, numel: usize) -> f64 {
        numel.next_multiple_of(ALIGNMENT * self.placement.group_size) as f64
    }

    /// Number of elements of what this rank computes of the unit.
    pub(super) fn gathered(&self, unit: &UnitCost) -> f64 {
        self.padded(unit) / unit.n_parts as f64
    }

    /// Number of the ranks of a shard group from which a rank gathers the unit.
    pub(super) fn n_shards(&self, unit: &UnitCost) -> usize {
        (self.placement.group_size / unit.n_parts).max(1)
    }

    /// Number of elements of this rank's shards of `unit`: of its parameters and its adapters.
    pub(super) fn shard(&self, unit: &UnitCost) -> f64 {
        (self.padded(unit) + self.adapters(unit)) / self.placement.group_size as f64
    }

    /// Number of elements of this rank's shards of `network`.
    pub(super) fn shards(&self, network: &NetworkCost) -> f64 {
        network.units().map(|unit| self.shard(unit)).sum()
    }

    /// Number of elements of this rank's shard of what is trained of `unit`: of its gradient, and
    /// of each moment.
    pub(super) fn trained_shard(&self, unit: &UnitCost) -> f64 {
        self.padded_numel(unit.n_trained()) / self.placement.group_size as f64
    }

    /// Number of elements of this rank's shards of what is trained of `network`, or follows.
    pub(super) fn trained_shards(&self, network: &NetworkCost) -> f64 {
        network.units().map(|unit| self.trained_shard(unit)).sum()
    }

    /// Bytes of the unit's input for all images.
    pub(super) fn input_bytes(&self, unit: &UnitCost) -> f64 {
        self.bytes(unit.input, self.n_images())
    }

    /// Bytes of all that the unit is given for all images.
    pub(super) fn given_bytes(&self, unit: &UnitCost) -> f64 {
        self.bytes(unit.given, self.n_images())
    }

    /// Bytes that the first unit of a segment keeps: where every unit keeps its input, those before
    /// a part keep what it shares with them.
    pub(super) fn kept_bytes(&self, unit: &UnitCost) -> f64 {
        if self.placement.segment > 1 { self.given_bytes(unit) } else { self.input_bytes(unit) }
    }

    /// Bytes of a part of a unit's output for `n_images`, with a high number of masked cells.
    pub(super) fn part_bytes(&self, part: &OutputPart, n_images: f64) -> f64 {
        self.bytes(part.elements, n_images) * self.high_ratio(part.masked_share, n_images)
    }

    /// Bytes of the unit's graph for `n_images`, with a high number of masked cells.
    pub(super) fn graph_bytes(&self, unit: &UnitCost, n_images: f64) -> f64 {
        let loss_elements = if self.placement.is_gpu { unit.loss_elements } else { 0.0 };
        let graph = unit.graph + Elements::wide(loss_elements);
        self.bytes(graph, n_images) * self.high_ratio(unit.masked_share, n_images)
    }

    /// Bytes of gradients within `unit` that the backward pass of a micro-batch holds beside the
    /// graph.
    pub(super) fn inner_gradient_bytes(&self, unit: &UnitCost) -> f64 {
        self.bytes(unit.inner_gradients, self.micro_batch())
    }

    fn bytes(&self, elements: Elements, n_images: f64) -> f64 {
        elements.bytes(self.placement.precision.types()) * n_images
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
