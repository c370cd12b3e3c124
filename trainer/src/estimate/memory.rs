//! Memory of a rank in bytes: a running sum over the events of a step.
//!
//! Tests compare the estimate with the measured peak of one rank (`tests/it/plan.rs`).

use std::collections::VecDeque;

use burn_tensor::DType;
use kernels::ops::ProductLimits;
use ranks::buffer_pool::{SpareBuffers, word_count};
use ranks::ordered::n_partial_sums;

use super::Placement;
use super::gradients::EarlierGradients;
use super::heads::head_bytes;
use super::placed::{F32, PlacedModel};
use crate::cost::ModelCost;
use crate::step::events::{Activations, Event, StepNetwork};
use crate::step::precision::Arithmetic;

/// Memory that a rank holds at the peak of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Memory {
    /// Shards of all networks and of moments; zero where they are offloaded to the host.
    pub state_bytes: f64,
    /// Shards of gradients.
    pub gradient_bytes: f64,
    /// Gathered units in transfer, in use or kept at the peak, and unused buffers of the pool.
    pub gathered_bytes: f64,
    /// Pixels of a batch in the form that the first unit takes.
    pub input_bytes: f64,
    /// Inputs and graphs at the peak that wait for their backward pass.
    pub activation_bytes: f64,
    /// The graph in use, and gradients of units before they are shards and after that, at the peak.
    /// Also constrained values of heads.
    pub work_bytes: f64,
    /// Buffers that the threads of a CPU keep from one product to the next.
    pub buffer_bytes: f64,
    /// Copies of the state while a checkpoint is written: the optimizer changes what is being
    /// saved.
    pub checkpoint_bytes: f64,
}

impl Memory {
    /// Memory that must be available: the peak of a step during which a checkpoint is written.
    pub fn needed_bytes(&self) -> f64 {
        self.peak_bytes() + self.checkpoint_bytes
    }

    /// Peak of a step. Gradient shards grow while graphs shrink: `work_bytes` includes them.
    pub fn peak_bytes(&self) -> f64 {
        self.state_bytes + self.gathered_bytes + self.pass_bytes()
    }

    /// Memory that passes take besides weights, at the peak.
    pub fn pass_bytes(&self) -> f64 {
        self.input_bytes + self.activation_bytes + self.work_bytes + self.buffer_bytes
    }
}

/// Estimates the memory of a rank.
pub fn memory(model: &ModelCost, placement: &Placement) -> Memory {
    let placed = PlacedModel { model, placement };
    let events = placed.events();
    let mut walk = Walk::default();
    // What one step leaves in the pool of buffers, the next one finds.
    walk.run(placed, &events);
    walk.run(placed, &events);
    // The trained network with its moments, and the others; a checkpoint leaves out frozen ones.
    let trained_shards = placed.trained_shards(&model.trained);
    let with_moments = placed.shards(&model.trained) + model.n_moments as f64 * trained_shards;
    let mut others = 0.0;
    let mut saved_others = 0.0;
    for network in &model.others {
        let shards = placed.shards(network);
        others += shards;
        saved_others += if network.is_frozen { 0.0 } else { shards };
    }
    let on_device = if placement.offload { 0.0 } else { 1.0 };
    let largest_shard = model.trained.units().map(|unit| placed.shard(unit)).fold(0.0, f64::max);
    // Constrained values of heads, as they were and as they are, stay until they are written back.
    let heads = &model.trained.head;
    let constrained = heads.iter().map(|unit| unit.n_constrained as f64 / unit.n_parts as f64);
    Memory {
        state_bytes: on_device * F32 * (with_moments + others),
        gradient_bytes: F32 * trained_shards,
        input_bytes: F32 * model.pixels * placed.n_images(),
        work_bytes: 2.0 * F32 * constrained.sum::<f64>() + walk.peak.work_bytes,
        buffer_bytes: product_buffer_bytes(placed),
        checkpoint_bytes: on_device * F32 * (with_moments + saved_others + largest_shard),
        ..walk.peak
    }
}

/// Buffer of the gathered weights of a unit.
#[derive(Clone, Copy)]
struct WeightBuffer {
    /// Number of 32-bit words; 0 if a rank computes with its own weights.
    n_words: usize,
    /// Sums of the weights with adapters, which take their place; `None` for a unit without
    /// adapters, and once they have taken it.
    sums: Option<AdapterSums>,
    /// Whether the buffer is of the pool: the weights come from other ranks or from host memory,
    /// and are not kept until the backward pass.
    is_pooled: bool,
}

/// Sums of the weights of a unit with its adapters.
#[derive(Clone, Copy)]
struct AdapterSums {
    /// Number of 32-bit words of the sums and of the adapters.
    n_words: usize,
    /// Number of 32-bit words of the sums before they are rounded; 0 where they are not.
    n_unrounded_words: usize,
}

impl WeightBuffer {
    fn new(placed: PlacedModel<'_>, network: StepNetwork, unit: usize, is_kept: bool) -> Self {
        let placement = placed.placement;
        let is_backbone = placed.is_backbone(network, unit);
        let dtype = if is_backbone { placement.precision.gathered() } else { DType::F32 };
        let unit = placed.unit(network, unit);
        // A rank that has all of what it computes with uses its own weights, unless it rounds them.
        let is_moved = placement.offload || placed.n_shards(unit) > 1;
        let numel = placed.gathered(unit) as usize;
        if unit.has_adapters() {
            let n_words = if is_moved { word_count(numel, DType::F32) } else { 0 };
            let n_adapter_words = word_count(placed.adapters(unit) as usize, DType::F32);
            let is_rounded = dtype != DType::F32;
            let sums = AdapterSums {
                n_words: word_count(numel, dtype) + n_adapter_words,
                n_unrounded_words: if is_rounded { word_count(numel, DType::F32) } else { 0 },
            };
            return Self { n_words, sums: Some(sums), is_pooled: is_moved };
        }
        let has_buffer = is_moved || dtype != DType::F32;
        let n_words = if has_buffer { word_count(numel, dtype) } else { 0 };
        Self { n_words, sums: None, is_pooled: is_moved && !is_kept }
    }
}

/// Memory of a rank, followed through the events of a step.
#[derive(Default)]
struct Walk {
    /// Words of the buffers of weights in use.
    n_used_words: usize,
    /// Words of the buffers of the pool that wait to be used again.
    spare: SpareBuffers<usize>,
    /// Weights whose gather is not submitted yet.
    gathers: VecDeque<WeightBuffer>,
    /// Weights in transfer.
    in_transfer: Option<WeightBuffer>,
    /// Weights for the next computation.
    gathered: Vec<WeightBuffer>,
    /// Weights that units keep; the last units are the first to release them.
    kept: Vec<WeightBuffer>,
    /// Inputs and graphs that wait for their backward pass.
    activation_bytes: f64,
    gradients: EarlierGradients,
    /// The memory that differs from event to event, at the moment of its largest sum.
    peak: Memory,
}

impl Walk {
    /// Follows a step.
    fn run(&mut self, placed: PlacedModel<'_>, events: &[Event]) {
        self.gradients = EarlierGradients::default();
        self.peak = Memory::default();
        for event in events {
            if let Event::Gather { network, unit, is_kept } = *event {
                self.gathers.push_back(WeightBuffer::new(placed, network, unit, is_kept));
            }
        }
        for (position, event) in events.iter().enumerate() {
            match *event {
                Event::Gather { is_kept, .. } => {
                    self.look_ahead();
                    let buffer = self.in_transfer.take().map(|buffer| self.merge(buffer));
                    let arrived = if is_kept { &mut self.kept } else { &mut self.gathered };
                    arrived.extend(buffer);
                    if matches!(events.get(position + 1), Some(Event::Gather { .. })) {
                        self.look_ahead();
                    }
                }
                Event::Reduce { .. } => {}
                _ => {
                    self.look_ahead();
                    self.compute(placed, *event);
                    for buffer in std::mem::take(&mut self.gathered) {
                        self.release(buffer);
                    }
                }
            }
        }
        // Gradients of units that are never trained are zeros.
        let fixed = &placed.model.trained.backbone[..placed.model.n_fixed];
        let mut zeros = 0.0;
        for unit in fixed {
            zeros += if unit.has_adapters() { placed.trained_shard(unit) } else { placed.shard(unit) };
        }
        self.check(self.gradients.at_end_bytes() + F32 * zeros);
    }

    /// Submits the next gather, unless one is in transfer. It takes a buffer that waits, if one is
    /// large enough.
    fn look_ahead(&mut self) {
        if self.in_transfer.is_none()
            && let Some(mut buffer) = self.gathers.pop_front()
        {
            if buffer.is_pooled {
                buffer.n_words = self.spare.take(buffer.n_words).unwrap_or(buffer.n_words);
            }
            self.n_used_words += buffer.n_words;
            self.in_transfer = Some(buffer);
        }
    }

    /// Replaces the buffer of weights that have arrived by that of their sums with adapters, if the
    /// unit has some. The weights, the sums and the rounded sums are in memory at the same time.
    fn merge(&mut self, buffer: WeightBuffer) -> WeightBuffer {
        let Some(sums) = buffer.sums else { return buffer };
        self.n_used_words += sums.n_words + sums.n_unrounded_words;
        self.check(self.gradients.at_end_bytes());
        self.n_used_words -= sums.n_unrounded_words;
        self.release(buffer);
        WeightBuffer { n_words: sums.n_words, sums: None, is_pooled: false }
    }

    fn release(&mut self, buffer: WeightBuffer) {
        self.n_used_words -= buffer.n_words;
        if buffer.is_pooled {
            self.spare.put(buffer.n_words);
        }
    }

    /// Follows an event that computes; its weights have been gathered.
    fn compute(&mut self, placed: PlacedModel<'_>, event: Event) {
        let backbone = &placed.model.trained.backbone;
        match event {
            Event::Forward { unit, retention } => {
                if !placed.segments().is_trained(unit) {
                    self.check(inferred_bytes(placed, unit));
                }
                self.activation_bytes += match retention.activations {
                    Activations::Graph => placed.graph_bytes(&backbone[unit], placed.n_images()),
                    Activations::Input => placed.kept_bytes(&backbone[unit]),
                    Activations::Nothing => 0.0,
                };
            }
            Event::Loss => {
                self.check(head_bytes(placed));
                self.gradients.push_heads(placed);
            }
            // The output stays in memory: the backward pass of the next unit starts from it.
            Event::Repeat { unit } => self.activation_bytes += placed.input_bytes(&backbone[unit + 1]),
            Event::Backward { unit, recomputes } => self.backward(placed, unit, recomputes),
            Event::Infer { .. } | Event::InferHeads { .. } | Event::Gather { .. } | Event::Reduce { .. } => {}
        }
    }

    /// Follows the backward pass of unit `index` of the backbone.
    fn backward(&mut self, placed: PlacedModel<'_>, index: usize, recomputes: bool) {
        let placement = placed.placement;
        let unit = &placed.model.trained.backbone[index];
        let gathers_next = self.in_transfer.is_some_and(|buffer| buffer.is_pooled);
        // Every worker has the gradient of its slice, by parameter, beside the sums of earlier
        // micro-batches.
        let sums = n_partial_sums(placement.rank_micro_batches) as f64 * placed.gradient(unit);
        let running_bytes = F32 * (sums + (placement.workers * unit.gradients_at_once) as f64)
            + self.gradients.running_bytes(unit, gathers_next);
        if recomputes {
            self.check(recomputed_bytes(placed, index) + running_bytes);
            let is_first = placed.segments().keeps_input(index);
            self.activation_bytes -=
                if is_first { placed.kept_bytes(unit) } else { placed.input_bytes(unit) };
        } else {
            self.check(running_bytes);
            self.activation_bytes -= placed.graph_bytes(unit, placed.n_images());
        }
        // The graph is gone; the weights are still there, and so are the gradient at the input, the
        // sum of all gradients, by parameter, and a copy of it as one flat buffer, in the type in
        // which it is sent. If that is not f32, each parameter's sum is freed when it has been
        // rounded.
        let sent = placement.precision.reduce.bytes() as f64;
        let flat_bytes = (F32 + if sent < F32 { sent / 2.0 } else { sent }) * placed.gradient(unit);
        self.check(flat_bytes + placed.given_bytes(unit) + self.gradients.at_end_bytes());
        if let Some(buffer) = self.kept.pop() {
            self.release(buffer);
        }
        if unit.n_trained() > 0 {
            self.gradients.push_unit(placed, unit);
        }
    }

    /// Compares the sum of all memory, with `work_bytes` in use, with the peak.
    fn check(&mut self, work_bytes: f64) {
        let n_spare_words: usize = self.spare.iter().sum();
        let gathered_bytes = F32 * (self.n_used_words + n_spare_words) as f64;
        let activation_bytes = self.activation_bytes;
        let now = Memory { gathered_bytes, activation_bytes, work_bytes, ..Memory::default() };
        if now.peak_bytes() > self.peak.peak_bytes() {
            self.peak = now;
        }
    }
}

/// Returns the bytes of the graph of unit `index`, which runs again, and of the gradients at its
/// output and its input.
fn recomputed_bytes(placed: PlacedModel<'_>, index: usize) -> f64 {
    let backbone = &placed.model.trained.backbone;
    let unit = &backbone[index];
    let output = backbone.get(index + 1).map_or(0.0, |next| placed.given_bytes(next));
    let given = placed.given_bytes(unit);
    // Between the stages of a unit the graphs are those of all images, and so are the gradients
    // between parts.
    if unit.n_sums > 0 {
        return placed.graph_bytes(unit, placed.n_images()) + output + given;
    }
    let graph = placed.graph_bytes(unit, placed.micro_batch()) + placed.inner_gradient_bytes(unit);
    if unit.given != unit.input {
        return graph + output + given;
    }
    // The gradients at the output of one micro-batch after another become gradients at the input.
    let n_micro_batches = placed.placement.rank_micro_batches.max(1) as f64;
    graph + (output + given / n_micro_batches).max(output / n_micro_batches + given)
}

/// Returns the bytes of the input and output of unit `index`, which is never trained, and an upper
/// limit of what it holds between them.
fn inferred_bytes(placed: PlacedModel<'_>, index: usize) -> f64 {
    let backbone = &placed.model.trained.backbone;
    let unit = &backbone[index];
    let output = backbone.get(index + 1).map_or(0.0, |next| placed.given_bytes(next));
    placed.given_bytes(unit) + placed.graph_bytes(unit, placed.micro_batch()) + output
}

/// Returns the bytes of the buffers of products: each worker's, and one in f32 for the heads, which
/// other threads help to compute: each of them may keep another one.
fn product_buffer_bytes(placed: PlacedModel<'_>) -> f64 {
    let workers = placed.placement.workers;
    let mut limits = ProductLimits::default();
    for unit in &placed.model.trained.backbone {
        limits = limits.max(unit.products);
    }
    limits.n_rows *= (placed.micro_batch() as usize).div_ceil(workers.max(1));
    let mut n_bytes = (workers + 1) * limits.kept_bytes(DType::F32);
    if placed.placement.precision.compute == Arithmetic::Bf16 {
        n_bytes += workers * limits.kept_bytes(DType::BF16);
    }
    n_bytes as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::UnitCost;
    use crate::step::precision::Precision;
    use networks::unit::Elements;

    /// Takes a buffer of the pool.
    fn take(walk: &mut Walk, n_words: usize) -> WeightBuffer {
        walk.gathers.push_back(WeightBuffer { n_words, sums: None, is_pooled: true });
        walk.look_ahead();
        walk.in_transfer.take().unwrap()
    }

    /// Returns the bytes of all buffers.
    fn buffer_bytes(walk: &mut Walk) -> f64 {
        walk.peak = Memory::default();
        walk.check(0.0);
        walk.peak.gathered_bytes
    }

    #[test]
    fn a_buffer_that_waits_is_used_again_unless_it_is_far_too_long() {
        let mut walk = Walk::default();
        let long = take(&mut walk, 100);
        walk.release(long);
        let again = take(&mut walk, 90);
        assert_eq!(buffer_bytes(&mut walk), 400.0);
        walk.release(again);
        take(&mut walk, 10);
        assert_eq!(buffer_bytes(&mut walk), 440.0);
    }

    /// Units that are never trained keep no graph and have no gradient but zeros.
    #[test]
    fn fixed_units_take_less_memory() {
        let unit = UnitCost { numel: 1000, graph: Elements::wide(1e6), ..UnitCost::empty("unit") };
        let units = vec![unit; 4];
        let placement = Placement { keep: 4, ..Placement::one_image_each(1) };
        let mut peaks = Vec::new();
        for n_fixed in 0..=4 {
            let model = ModelCost { n_fixed, ..ModelCost::with_backbone(units.clone()) };
            peaks.push(memory(&model, &placement).peak_bytes());
        }
        // Of the last unit, the graph while it runs is counted in any case.
        for pair in peaks[..4].windows(2) {
            assert!((pair[0] - pair[1] - F32 * 1e6).abs() < 0.1 * F32 * 1e6, "{peaks:?}");
        }
        assert!(peaks[4] <= peaks[3], "{peaks:?}");
    }

    /// By hand: weights of 1024 elements, adapters of 64 with one moment and a gradient, and the
    /// sums that a kept unit holds beside its adapters.
    #[test]
    fn adapters_have_the_moments_and_gradients() {
        let adapted = UnitCost { numel: 1024, n_adapters: Some(64), ..UnitCost::empty("unit") };
        let fixed = UnitCost { numel: 128, n_adapters: Some(0), ..UnitCost::empty("norm") };
        let model = ModelCost::with_backbone(vec![adapted, fixed]);
        let placement = Placement { keep: 2, ..Placement::one_image_each(1) };
        let needed = memory(&model, &placement);
        assert_eq!(needed.state_bytes, F32 * (1024.0 + 64.0 + 128.0 + 64.0));
        assert_eq!(needed.gradient_bytes, F32 * 64.0);
        assert_eq!(needed.gathered_bytes, F32 * (1024.0 + 64.0));
        assert_eq!(model.checkpoint_numel(), 1024 + 64 + 128 + 64);
    }

    /// By hand: sums of 1024 elements in f32, the same in bf16, and adapters of 64.
    #[test]
    fn sums_with_adapters_are_in_memory_before_they_are_rounded() {
        let adapted = UnitCost { numel: 1024, n_adapters: Some(64), ..UnitCost::empty("unit") };
        let model = ModelCost::with_backbone(vec![adapted]);
        let rounded = Placement { precision: Precision::BF16, ..Placement::one_image_each(1) };
        assert_eq!(memory(&model, &rounded).gathered_bytes, F32 * (1024.0 + 512.0 + 64.0));
    }

    /// A unit of two ranks that keeps its weights, and one of a rank that rounds them.
    #[test]
    fn kept_weights_and_those_that_are_not_moved_leave_no_buffer() {
        let unit = UnitCost { numel: 1 << 20, ..UnitCost::empty("unit") };
        let model = ModelCost::with_backbone(vec![unit]);
        let kept = Placement { keep: 1, ..Placement::one_image_each(2) };
        let rounded = Placement { precision: Precision::BF16, ..Placement::one_image_each(1) };
        for (placement, n_bytes) in [(kept, 4 << 20), (rounded, 2 << 20)] {
            let placed = PlacedModel { model: &model, placement: &placement };
            let mut walk = Walk::default();
            walk.run(placed, &placed.events());
            assert_eq!(walk.peak.gathered_bytes, f64::from(n_bytes));
            assert_eq!(buffer_bytes(&mut walk), 0.0);
        }
    }
}
