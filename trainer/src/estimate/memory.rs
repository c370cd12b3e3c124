//! Memory of a rank in bytes, by item.

use burn_tensor::DType;
use kernels::ops::ProductLimits;

use super::backward::BackwardPass;
use super::gathered::gathered_weights;
use super::heads::{constrained_value_bytes, head_bytes};
use super::placed::{F32, PlacedModel};
use super::{ModelCost, Placement};
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
    /// The graph in use, and gradients of whole units before they are sharded, in the worse of two
    /// phases: the heads, and the backward pass, less what it has freed by then. Also constrained
    /// values of heads.
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
    let gathered = gathered_weights(placed);
    let images = placed.n_images();
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
        activation_bytes: placed
            .backbone()
            .iter()
            .enumerate()
            .map(|(number, unit)| match placed.keeps_graph(number) {
                true => placed.graph_bytes(unit, images),
                false if placed.segments().keeps_input(number) => placed.kept_bytes(unit),
                false => 0.0,
            })
            .sum(),
        work_bytes: constrained_value_bytes(placed) + head_bytes(placed).max(backward.peak_bytes()),
        buffer_bytes: product_buffer_bytes(placed),
        checkpoint_bytes: here * F32 * (with_moments + others(false) + largest_shard),
    }
}

/// Returns the bytes of the buffers of products: each worker's, and one in f32 for the heads, which
/// other threads help to compute: each of them may keep another one.
fn product_buffer_bytes(placed: PlacedModel<'_>) -> f64 {
    let placement = placed.placement;
    let backbone = placed.backbone();
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
