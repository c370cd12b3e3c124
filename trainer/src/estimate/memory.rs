//! Memory of a rank in bytes, by item.

use super::backward::{BackwardPass, partial_sums};
use super::gathered::gathered_weights;
use super::placed::{F32, PlacedModel};
use super::{ModelCost, Placement, UnitCost};

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
        self.state_bytes + self.gathered_bytes + self.input_bytes + self.activation_bytes + self.work_bytes
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
        checkpoint_bytes: here * F32 * (with_moments + others(false) + largest_shard),
    }
}

/// Returns the bytes of the graphs of the heads, and of the gradients of their units.
fn head_bytes(placed: PlacedModel<'_>) -> f64 {
    let (heads, placement) = (placed.heads(), placed.placement);
    let (images, micro_batch) = (placed.n_images(), placed.micro_batch());
    // Divided columns: the graph of one micro-batch of the group after another, and the targets of all of them.
    // Units before them go through the passes of a step, with all images.
    let is_divided = |unit: &&UnitCost| unit.n_parts > 1;
    let at_once = if heads.iter().any(|unit| is_divided(&unit)) { images } else { micro_batch };
    let graph = |unit: &UnitCost| match unit.n_parts {
        1 => placed.graph_bytes(unit, at_once),
        n_parts => placed.graph_bytes(unit, micro_batch) / n_parts as f64,
    };
    let divided = placed.model.others.iter().flat_map(|network| &network.head).filter(is_divided);
    let targets: f64 =
        divided.map(|unit| placed.graph_bytes(unit, images) + group_input_bytes(unit, images)).sum();
    // The inputs of the group, and the gradients at them, which are listed, joined, sent and received.
    let exchanged: f64 =
        heads.iter().filter(is_divided).map(|unit| 5.0 * group_input_bytes(unit, images)).sum();
    // Gradients exist by parameter and as one flat buffer. Constrained parameters are copied into what was gathered, and kept
    // until they are written back.
    let gradients: f64 = heads.iter().map(|unit| placed.gathered(unit)).sum();
    let constrained: f64 = heads.iter().map(|unit| unit.n_constrained as f64 / unit.n_parts as f64).sum();
    let summed = |unit: &UnitCost| {
        let n_graphs = unit.n_parts * placement.rank_micro_batches;
        partial_sums(n_graphs) as f64 * placed.gathered(unit)
    };
    let partial: f64 = heads.iter().map(summed).sum();
    let graphs: f64 = heads.iter().map(graph).sum();
    graphs + targets + exchanged + F32 * (2.0 * (gradients + constrained) + partial)
}

/// Bytes of the inputs of a unit with divided columns, for the images of the whole group.
fn group_input_bytes(unit: &UnitCost, images: f64) -> f64 {
    F32 * unit.input.wide * images * unit.n_parts as f64
}
