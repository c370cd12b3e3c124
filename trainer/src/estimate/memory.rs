//! Memory of a rank in bytes, by item.

use burn_tensor::DType;
use networks::layout::ALIGNMENT;
use ranks::topology::Sharding;

use super::{ModelCost, NetworkCost, Placement, UnitCost, of_plan};
use crate::error::TrainError;
use crate::recipe::plan::{Plan, RankResources};

/// Bytes of an element in memory.
const F32: f64 = 4.0;

/// Memory that a rank holds at the peak of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Memory {
    /// Shards of all networks and of moments; zero where they are offloaded to the host.
    pub state_bytes: f64,
    /// Shards of gradients.
    pub gradient_bytes: f64,
    /// Gathered units in transfer, in use or kept.
    pub gathered_bytes: f64,
    /// Pixels of a batch in the form that the first unit takes.
    pub input_bytes: f64,
    /// Inputs and graphs that stay until the backward pass.
    pub activation_bytes: f64,
    /// The graph in use, and gradients of whole units before they are sharded; in the worse of two
    /// phases: the head, and the units' backward pass.
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
    let padded = |unit: &UnitCost| unit.numel.next_multiple_of(ALIGNMENT * placement.group_size) as f64;
    let sum = |units: &[UnitCost]| units.iter().map(padded).sum::<f64>();
    let largest = |units: &[UnitCost]| units.iter().map(padded).fold(0.0, f64::max);
    let trained = &model.trained;
    let (head, group) = (sum(&trained.head), placement.group_size as f64);
    let shards_of = |network: &NetworkCost| (sum(&network.backbone) + sum(&network.head)) / group;
    let shards = shards_of(trained);
    let first_kept = trained.backbone.len().saturating_sub(placement.keep);
    let (again, kept) = trained.backbone.split_at(first_kept);
    // The types of numbers, and bytes of an element of a gathered unit and of a gradient that is sent.
    let (precision, types) = (placement.precision, placement.precision.types());
    let [of_weight, of_gradient] =
        [precision.gathered(), precision.reduce.dtype()].map(|dtype| dtype.size() as f64);
    // All heads are in memory while the next unit is gathered; elsewhere one unit while the next is gathered. One rank
    // computes with its own weights, unless it rounds them.
    let gathers = placement.gathers();
    let passing_of = |network: &NetworkCost| {
        let (unit, heads) = (of_weight * largest(&network.backbone), F32 * sum(&network.head));
        (if gathers { heads } else { 0.0 }).max(unit) + unit
    };
    let transient = model.networks().map(passing_of).fold(0.0, f64::max);
    let gathered_bytes = match (gathers || precision.gathered() != DType::F32, placement.sharding) {
        (false, _) => 0.0,
        (true, Sharding::Grad) => of_weight * sum(&trained.backbone) + transient,
        (true, _) => of_weight * sum(kept) + transient,
    };
    let images = placement.rank_batch as f64;
    let micro_batch = images / placement.rank_micro_batches.max(1) as f64;
    let input_bytes = |unit: &UnitCost| unit.input.bytes(types) * images;
    let inputs: f64 = again.iter().map(input_bytes).sum();
    let graphs: f64 = kept.iter().map(|unit| unit.graph.bytes(types) * images).sum();
    let head_graph_bytes: f64 = trained.head.iter().map(|unit| unit.graph.bytes(types) * micro_batch).sum();
    // Gradients exist by parameter and as one flat buffer; the prototypes' gradient is a sum of two addends. Constrained
    // parameters are copied into what was gathered, and kept until they are written back.
    let prototypes = trained.head.last().map_or(0.0, padded);
    let constrained: f64 = trained.head.iter().map(|unit| unit.n_constrained as f64).sum();
    let in_head = head_graph_bytes + F32 * (2.0 * head + prototypes + 2.0 * constrained);
    let at_once = |unit: &UnitCost| if unit.staged { images } else { micro_batch };
    // Every worker has the gradients of its slice, by parameter, beside the sums of earlier micro-batches; at the end
    // there are the sum of all and a copy of it as one flat buffer, in the type in which it is sent.
    let sums = F32 * (placement.workers + partial_sums(placement.rank_micro_batches)) as f64;
    let of_unit = |unit: &UnitCost| sums.max(F32 + of_gradient) * padded(unit);
    // At the start the head's gradients are in transfer; at the end all shards exist.
    let in_transfer = if placement.world_size > 1 { head + largest(&trained.head) } else { head };
    // From the last unit to the first, of which `freed` is what those behind it held.
    let (mut freed, mut backwards) = (0.0, 0.0_f64);
    for unit in kept.iter().rev() {
        backwards = backwards.max(of_unit(unit) - freed);
        freed += unit.graph.bytes(types) * images;
    }
    for (number, unit) in again.iter().enumerate().rev() {
        // Between the stages of a unit the gradients at its output and its input are of all images.
        let output = trained.backbone.get(number + 1).map_or(0.0, input_bytes);
        let at_ends = if unit.staged { output + input_bytes(unit) } else { 0.0 };
        let live = unit.graph.bytes(types) * at_once(unit) + at_ends;
        backwards = backwards.max(live + of_unit(unit) - freed);
        freed += input_bytes(unit);
    }
    let backwards = backwards + F32 * in_transfer.max(shards);
    // The trained network with its moments, and the others; a checkpoint leaves out frozen ones.
    let with_moments = (1.0 + model.n_moments as f64) * shards;
    let others = |frozen: bool| -> f64 {
        model.others.iter().filter(|network| frozen || !network.is_frozen).map(shards_of).sum()
    };
    let here = if placement.offload { 0.0 } else { 1.0 };
    Memory {
        state_bytes: here * F32 * (with_moments + others(true)),
        gradient_bytes: F32 * shards,
        gathered_bytes,
        input_bytes: F32 * model.pixels * images,
        activation_bytes: inputs + graphs,
        work_bytes: in_head.max(backwards),
        checkpoint_bytes: here
            * F32
            * (with_moments + others(false) + largest(&trained.backbone).max(largest(&trained.head)) / group),
    }
}

/// Returns the number of partial sums held while the next of `n` parts is computed, in the order of
/// [`ranks::ordered`]: one for each halving, and one for the sequence.
fn partial_sums(n: usize) -> usize {
    let halvings = n.max(1).trailing_zeros();
    halvings as usize + usize::from(n >> halvings > 1)
}

/// Returns `plan` with as many units that keep their graph as fit into `room`, where its recipe leaves that open.
///
/// # Errors
/// [`TrainError::Recipe`] when the method cannot be built, or when far more memory is needed than there is.
pub fn fit(mut plan: Plan, room: RankResources) -> Result<Plan, TrainError> {
    let (model, placement) = (of_plan(&plan)?, Placement::of(&plan));
    if plan.recipe.run.keep.is_none() {
        plan.keep = max_kept_graphs(&model, &placement, room.bytes).unwrap_or(0);
    }
    let keep = plan.keep.min(model.trained.backbone.len());
    let peak_bytes = memory(&model, &Placement { keep, ..placement }).peak_bytes();
    if peak_bytes > MAX_OVERCOMMIT * room.bytes {
        let reason = format!(
            "a rank would need about {:.1} GB and has {:.1} GB: fewer images a step (optim.batch_size), a smaller model, more \
             ranks, or optim.micro_batches; `ocelli plan` says what would fit",
            peak_bytes / 1e9,
            room.bytes / 1e9
        );
        return Err(TrainError::Recipe { recipe: plan.recipe.name.clone(), reason });
    }
    Ok(plan)
}

/// Multiple of the rank's memory above which a plan is refused. The margin allows for memory that other processes
/// free, and for errors of the estimate.
const MAX_OVERCOMMIT: f64 = 1.5;

/// Returns the largest number of units that can keep their graph within `bytes` of a rank's memory; `None` if even 0
/// does not fit.
pub fn max_kept_graphs(model: &ModelCost, placement: &Placement, bytes: f64) -> Option<usize> {
    let fits = |keep: &usize| memory(model, &Placement { keep: *keep, ..*placement }).needed_bytes() <= bytes;
    (0..=model.trained.backbone.len()).rev().find(fits)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;
    use ranks::ordered::fold;

    /// The estimate equals the number of parts that are alive while parts are summed.
    #[test]
    fn partial_sums_are_those_of_the_order() {
        for n in [1, 2, 3, 4, 6, 7, 8, 12, 64] {
            let (alive, most) = (Rc::new(()), Cell::new(0));
            let mut part = |_: usize| {
                // `alive` itself is not a part.
                most.set(most.get().max(Rc::strong_count(&alive) - 1));
                Rc::clone(&alive)
            };
            let sum = |a: Rc<()>, _: Rc<()>| a;
            drop(fold(n, &mut part, &sum));
            assert_eq!(partial_sums(n), most.get(), "{n}");
        }
    }
}
