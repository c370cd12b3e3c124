//! Memory of a rank in bytes, by item.

use burn_tensor::DType;
use kernels::ops::ProductLimits;

use super::backward::{BackwardPass, partial_sums};
use super::gathered::gathered_weights;
use super::placed::{F32, PlacedModel};
use super::{ModelCost, Placement, UnitCost};
use crate::step::precision::Arithmetic;

/// Memory that a rank holds at the peak of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Memory {
    /// Shards of all networks and of moments; zero where they are offloaded to the host.
    pub state_bytes: f64,
    /// Shards of gradients.
    pub gradient_bytes: f64,
    /// Gathered units in transfer, in use or kept, and unused buffers of the pool.
    pub gathered_bytes: f64,
    /// Pixels of a batch in the form that the first unit takes.
    pub input_bytes: f64,
    /// Inputs and graphs that stay until the backward pass.
    pub activation_bytes: f64,
    /// The graph in use, and gradients of whole units before they are sharded, in the worse of two phases: the heads, and
    /// the backward pass, less what it has freed by then.
    pub work_bytes: f64,
    /// Buffers that the threads of a CPU keep from one product to the next.
    pub buffer_bytes: f64,
    /// Copies of the state while a checkpoint is written: the optimizer changes what is being saved.
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
    let gathered = gathered_weights(placed);
    let images = placed.n_images();
    let retained = |(number, unit): (usize, &UnitCost)| match placed.keeps_graph(number) {
        true => placed.graph_bytes(unit, images),
        false if placed.segments().keeps_input(number) => placed.kept_bytes(unit),
        false => 0.0,
    };
    let backward = BackwardPass { placed, gathered: &gathered };
    // The trained network with its moments, and the others; a checkpoint leaves out frozen ones.
    let shards = placed.shards_of(&model.trained);
    let with_moments = (1.0 + model.n_moments as f64) * shards;
    let others = |frozen: bool| -> f64 {
        let others = model.others.iter().filter(|network| frozen || !network.is_frozen);
        others.map(|network| placed.shards_of(network)).sum()
    };
    let here = if placement.offload { 0.0 } else { 1.0 };
    let largest_shard = model.trained.units().map(|unit| placed.shard(unit)).fold(0.0, f64::max);
    Memory {
        state_bytes: here * F32 * (with_moments + others(true)),
        gradient_bytes: F32 * shards,
        gathered_bytes: gathered.transient_bytes + gathered.kept_bytes.iter().sum::<f64>(),
        input_bytes: F32 * model.pixels * images,
        activation_bytes: placed.backbone().iter().enumerate().map(retained).sum(),
        work_bytes: head_bytes(placed).max(backward.peak_bytes()),
        buffer_bytes: product_buffer_bytes(placed),
        checkpoint_bytes: here * F32 * (with_moments + others(false) + largest_shard),
    }
}

/// Returns the bytes of the buffers of products: each worker's, and one in f32 for the heads, which other threads help to compute: each of
/// them may keep another one.
fn product_buffer_bytes(placed: PlacedModel<'_>) -> f64 {
    let (placement, backbone) = (placed.placement, placed.backbone());
    let of_image =
        backbone.iter().map(|unit| unit.products).fold(ProductLimits::default(), ProductLimits::max);
    let worker_images = (placed.micro_batch() as usize).div_ceil(placement.workers.max(1));
    let largest = ProductLimits { n_rows: of_image.n_rows * worker_images, ..of_image };
    let in_bf16 = match placement.precision.compute {
        Arithmetic::F32 => 0,
        Arithmetic::Bf16 => placement.workers * largest.kept_bytes(DType::BF16),
    };
    ((placement.workers + 1) * largest.kept_bytes(DType::F32) + in_bf16) as f64
}

/// Returns the most bytes of the heads: of their graphs with the gradients of units, or of these gradients when they become flat buffers.
fn head_bytes(placed: PlacedModel<'_>) -> f64 {
    let (heads, placement) = (placed.heads(), placed.placement);
    let is_divided = |unit: &&UnitCost| unit.n_parts > 1;
    let images = placed.n_images();
    // The inputs of the group, and the gradients at them, which are listed, joined, sent and received.
    let inputs: f64 = heads.iter().filter(is_divided).map(|unit| group_input_bytes(unit, images)).sum();
    // Gradients exist by parameter and as one flat buffer of a unit after another. Constrained parameters are
    // kept, as they were and as they are, until they are written back.
    let gradients = || heads.iter().map(|unit| placed.gathered(unit));
    let constrained: f64 = heads.iter().map(|unit| constrained_numel(placed, unit)).sum();
    let summed = |unit: &UnitCost| {
        let n_graphs = unit.n_parts * placement.rank_micro_batches;
        partial_sums(n_graphs) as f64 * placed.gathered(unit)
    };
    let partial: f64 = heads.iter().map(summed).sum();
    let held = targets_bytes(placed) + inputs + F32 * (gradients().sum::<f64>() + constrained + partial);
    let largest = F32 * gradients().fold(0.0, f64::max);
    held + largest.max(head_graph_bytes(placed) + 4.0 * inputs)
}

/// Number of elements of the parameters of a unit that are constrained, before and after, and of the copy of the unit that takes the place
/// of what was gathered.
fn constrained_numel(placed: PlacedModel<'_>, unit: &UnitCost) -> f64 {
    match unit.n_constrained {
        0 => 0.0,
        n_constrained => 2.0 * n_constrained as f64 / unit.n_parts as f64 + placed.gathered(unit),
    }
}

/// Bytes of the graphs of the heads in use at a time. Where columns are divided, those are the graphs of one micro-batch of the group
/// after another; units before them go through the passes of a step, with all images.
fn head_graph_bytes(placed: PlacedModel<'_>) -> f64 {
    let (heads, micro_batch) = (placed.heads(), placed.micro_batch());
    let is_divided = heads.iter().any(|unit| unit.n_parts > 1);
    let at_once = if is_divided { placed.n_images() } else { micro_batch };
    let (scoring, others): (Vec<_>, Vec<_>) = heads.iter().partition(|unit| unit.n_columns > 0);
    let scores = |unit: &UnitCost| -> Vec<f64> {
        placed.output_bytes(unit, micro_batch / unit.n_parts as f64).collect()
    };
    // The gradients at the scores of one view size after another become gradients at a head's input. They take the place of the scores,
    // unless these are needed.
    let held = scoring.iter().filter(|unit| unit.holds_output).flat_map(|unit| scores(unit));
    let of_scores = scoring.iter().flat_map(|unit| scores(unit)).sum::<f64>() + held.fold(0.0, f64::max);
    of_scores + others.iter().map(|unit| placed.graph_bytes(unit, at_once)).sum::<f64>()
}

/// Bytes of the scores that are computed without a graph for all images: of networks without gradients with the targets made of them, or of
/// the trained one. With the inputs of the group, where columns are divided.
fn targets_bytes(placed: PlacedModel<'_>) -> f64 {
    let images = placed.n_images();
    let networks = placed.model.others.iter().filter(|network| network.computes());
    let units = networks.flat_map(|network| &network.head).filter(|unit| unit.n_columns > 0);
    let of_unit = |unit: &UnitCost| {
        let inputs = if unit.n_parts > 1 { group_input_bytes(unit, images) } else { 0.0 };
        2.0 * placed.output_bytes(unit, images).sum::<f64>() + inputs
    };
    let again = placed.model.run_twice().filter(|unit| unit.n_columns > 0);
    // Targets are made of the scores of the first size.
    let of_both = |unit: &UnitCost| {
        let outputs = || placed.output_bytes(unit, images);
        outputs().sum::<f64>() + outputs().take(1).sum::<f64>()
    };
    units.map(of_unit).sum::<f64>() + again.map(of_both).sum::<f64>()
}

/// Bytes of the inputs of a unit with divided columns, for the images of the whole group.
fn group_input_bytes(unit: &UnitCost, images: f64) -> f64 {
    F32 * unit.input.wide * images * unit.n_parts as f64
}
