//! Memory of a rank in bytes: a running sum over the events of a step.
//!
//! Tests compare the estimate with the measured peak of one rank, to 6 % (`tests/it/plan.rs`), and
//! of several ranks, to 10 % (`tests/it/mpi.rs`); `peaks.py` compares them over many recipes.

use burn_tensor::DType;
use kernels::ops::ProductLimits;

use super::Placement;
use super::buffers::{WeightBuffer, WeightBuffers};
use super::gradients::{EarlierGradients, UnitGradient, flat_gradient_bytes, running_gradient_bytes};
use super::heads::{constrained_value_bytes, head_bytes};
use super::placed::{F32, PlacedModel};
use crate::cost::ModelCost;
use crate::step::precision::Arithmetic;
use crate::step::schedule::{Event, Retention, StepNetwork};

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
    let mut walk = Walk::new(placed);
    walk.run(&events);
    // What one step leaves in the pool of buffers, the next one finds.
    walk.peak = Peak::default();
    walk.run(&events);
    // The trained network with its moments, and the others; a checkpoint leaves out frozen ones.
    let shards = placed.shards(&model.trained);
    let with_moments = (1.0 + model.n_moments as f64) * shards;
    let mut others = 0.0;
    let mut saved_others = 0.0;
    for network in &model.others {
        let shards = placed.shards(network);
        others += shards;
        saved_others += if network.is_frozen { 0.0 } else { shards };
    }
    let on_device = if placement.offload { 0.0 } else { 1.0 };
    let largest_shard = model.trained.units().map(|unit| placed.shard(unit)).fold(0.0, f64::max);
    Memory {
        state_bytes: on_device * F32 * (with_moments + others),
        gradient_bytes: F32 * shards,
        gathered_bytes: walk.peak.gathered_bytes,
        input_bytes: F32 * model.pixels * placed.n_images(),
        activation_bytes: walk.peak.activation_bytes,
        work_bytes: constrained_value_bytes(placed) + walk.peak.work_bytes,
        buffer_bytes: product_buffer_bytes(placed),
        checkpoint_bytes: on_device * F32 * (with_moments + saved_others + largest_shard),
    }
}

/// The memory that differs from event to event, at the moment of its largest sum.
#[derive(Debug, Clone, Copy, Default)]
struct Peak {
    gathered_bytes: f64,
    activation_bytes: f64,
    work_bytes: f64,
}

/// Memory of a rank, followed through the events of a step.
struct Walk<'a> {
    placed: PlacedModel<'a>,
    buffers: WeightBuffers,
    /// Weights for the next computation.
    gathered: Vec<WeightBuffer>,
    /// Weights in transfer.
    ahead: Option<WeightBuffer>,
    /// Weights that units keep, by number of the unit; the last units are the first to release
    /// them.
    kept: Vec<(usize, WeightBuffer)>,
    /// Inputs and graphs that wait for their backward pass.
    activation_bytes: f64,
    gradients: EarlierGradients,
    peak: Peak,
}

impl<'a> Walk<'a> {
    fn new(placed: PlacedModel<'a>) -> Self {
        Self {
            placed,
            buffers: WeightBuffers::default(),
            gathered: Vec::new(),
            ahead: None,
            kept: Vec::new(),
            activation_bytes: 0.0,
            gradients: EarlierGradients::default(),
            peak: Peak::default(),
        }
    }

    /// Follows a step.
    fn run(&mut self, events: &[Event]) {
        self.gradients = EarlierGradients::default();
        for (position, event) in events.iter().enumerate() {
            let rest = &events[position + 1..];
            match *event {
                Event::Gather { network, unit, is_kept } => {
                    self.gather(network, unit, is_kept);
                    if matches!(rest.first(), Some(Event::Gather { .. })) {
                        self.look_ahead(rest);
                    }
                }
                Event::Reduce { .. } => {}
                _ => {
                    self.look_ahead(rest);
                    self.compute(*event);
                    for buffer in std::mem::take(&mut self.gathered) {
                        self.buffers.release(buffer);
                    }
                }
            }
        }
        self.check(self.gradients.at_end_bytes());
    }

    /// Returns the buffer for the weights of a unit.
    fn buffer(&self, network: StepNetwork, unit: usize, is_kept: bool) -> WeightBuffer {
        let is_head = unit >= self.placed.network(network).backbone.len();
        WeightBuffer::new(self.placed, self.placed.unit(network, unit), is_head, is_kept)
    }

    /// The weights of a unit arrive.
    fn gather(&mut self, network: StepNetwork, unit: usize, is_kept: bool) {
        let in_transfer = self.ahead.take();
        let buffer = in_transfer.unwrap_or_else(|| {
            let buffer = self.buffer(network, unit, is_kept);
            self.buffers.take(buffer)
        });
        self.gathered.push(buffer);
        if is_kept {
            self.kept.push((unit, buffer));
        }
    }

    /// The next gather among the events in `rest` is submitted.
    fn look_ahead(&mut self, rest: &[Event]) {
        if self.ahead.is_some() {
            return;
        }
        for event in rest {
            if let Event::Gather { network, unit, is_kept } = *event {
                let buffer = self.buffer(network, unit, is_kept);
                self.ahead = Some(self.buffers.take(buffer));
                return;
            }
        }
    }

    /// Follows the computation of an event, whose weights are gathered.
    fn compute(&mut self, event: Event) {
        let placed = self.placed;
        match event {
            Event::Forward { unit, retention } => {
                let unit = &placed.backbone()[unit];
                self.activation_bytes += match retention {
                    Retention { graph: true, .. } => placed.graph_bytes(unit, placed.n_images()),
                    Retention { input: true, .. } => placed.kept_bytes(unit),
                    _ => 0.0,
                };
            }
            Event::Loss => {
                self.check(head_bytes(placed));
                self.gradients.push(UnitGradient::for_heads(placed));
            }
            // Its output is the input of the next unit, which waits for its backward pass.
            Event::Repeat { unit } => {
                self.activation_bytes += placed.input_bytes(&placed.backbone()[unit + 1]);
            }
            Event::Backward { unit, recomputes } => self.backward(unit, recomputes),
            Event::Infer { .. } | Event::InferHeads { .. } | Event::Gather { .. } | Event::Reduce { .. } => {}
        }
    }

    /// Follows the backward pass of unit `number` of the backbone.
    fn backward(&mut self, number: usize, recomputes: bool) {
        let placed = self.placed;
        let unit = &placed.backbone()[number];
        let gathers_next = self.ahead.is_some_and(|buffer| buffer.is_moved);
        let earlier_bytes = self.gradients.running_bytes(unit, gathers_next);
        let running_bytes = running_gradient_bytes(placed, unit) + earlier_bytes;
        if recomputes {
            self.check(recomputed_bytes(placed, number) + running_bytes);
            let is_first = placed.segments().keeps_input(number);
            self.activation_bytes -=
                if is_first { placed.kept_bytes(unit) } else { placed.input_bytes(unit) };
        } else {
            self.check(running_bytes);
            self.activation_bytes -= placed.graph_bytes(unit, placed.n_images());
        }
        // The graph is gone; the weights are still there, and so is the gradient at the input.
        let flat_bytes = flat_gradient_bytes(placed, unit) + placed.given_bytes(unit);
        self.check(flat_bytes + self.gradients.at_end_bytes());
        if let Some((_, buffer)) = self.kept.pop_if(|(kept, _)| *kept == number) {
            self.buffers.free_kept(buffer);
        }
        self.gradients.push(UnitGradient::for_unit(placed, unit));
    }

    /// Compares the sum of all memory, with `work_bytes` in use, with the peak.
    fn check(&mut self, work_bytes: f64) {
        let gathered_bytes = self.buffers.bytes();
        let activation_bytes = self.activation_bytes;
        let peak = self.peak;
        if gathered_bytes + activation_bytes + work_bytes
            > peak.gathered_bytes + peak.activation_bytes + peak.work_bytes
        {
            self.peak = Peak { gathered_bytes, activation_bytes, work_bytes };
        }
    }
}

/// Returns the bytes of the graph of unit `number`, which runs again, and of the gradients at its
/// output and its input.
fn recomputed_bytes(placed: PlacedModel<'_>, number: usize) -> f64 {
    let unit = &placed.backbone()[number];
    let output = placed.backbone().get(number + 1).map_or(0.0, |next| placed.given_bytes(next));
    let given = placed.given_bytes(unit);
    let n_micro_batches = placed.placement.rank_micro_batches.max(1) as f64;
    // Between the stages of a unit the graphs are those of all images, and so are the gradients
    // between parts.
    let has_stages = unit.n_sums > 0;
    if has_stages || unit.given != unit.input {
        let at_once = if has_stages { placed.n_images() } else { placed.micro_batch() };
        return placed.graph_bytes(unit, at_once) + output + given;
    }
    // The gradients at the output of one micro-batch after another become gradients at the input.
    let gradients = (output + given / n_micro_batches).max(output / n_micro_batches + given);
    placed.graph_bytes(unit, placed.micro_batch()) + gradients
}

/// Returns the bytes of the buffers of products: each worker's, and one in f32 for the heads, which
/// other threads help to compute: each of them may keep another one.
fn product_buffer_bytes(placed: PlacedModel<'_>) -> f64 {
    let placement = placed.placement;
    let mut limits = ProductLimits::default();
    for unit in placed.backbone() {
        limits = limits.max(unit.products);
    }
    let worker_images = (placed.micro_batch() as usize).div_ceil(placement.workers.max(1));
    limits.n_rows *= worker_images;
    let in_bf16 = match placement.precision.compute {
        Arithmetic::F32 => 0,
        Arithmetic::Bf16 => placement.workers * limits.kept_bytes(DType::BF16),
    };
    ((placement.workers + 1) * limits.kept_bytes(DType::F32) + in_bf16) as f64
}
