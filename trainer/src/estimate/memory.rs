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
    let sizes = Sizes { model, placement };
    let (trained, types) = (&model.trained, placement.precision.types());
    let (again, kept) = sizes.again_and_kept();
    let images = placement.rank_batch as f64;
    let micro_batch = images / placement.rank_micro_batches.max(1) as f64;
    let segments = placement.segments(&trained.backbone);
    let keeping = again.iter().enumerate().filter(|(number, _)| segments.keeps_input(*number));
    let inputs: f64 = keeping.map(|(_, unit)| sizes.kept_bytes(unit)).sum();
    let graphs: f64 = kept.iter().map(|unit| unit.graph.bytes(types) * images).sum();
    // Divided columns: the graph of one micro-batch of the group after another, and the targets of all of them.
    // Units before them go through the passes of a step, with all images.
    let is_divided = |unit: &&UnitCost| unit.n_parts > 1;
    let at_once = if trained.head.iter().any(|unit| is_divided(&unit)) { images } else { micro_batch };
    let of_head = |unit: &UnitCost| match unit.n_parts {
        1 => unit.graph.bytes(types) * at_once,
        n_parts => unit.graph.bytes(types) * micro_batch / n_parts as f64,
    };
    let divided = model.others.iter().flat_map(|network| &network.head).filter(is_divided);
    let targets: f64 =
        divided.map(|unit| unit.graph.bytes(types) * images + group_input_bytes(unit, images)).sum();
    // The inputs of the group, and the gradients at them, which are listed, joined, sent and received.
    let exchanged: f64 =
        trained.head.iter().filter(is_divided).map(|unit| 5.0 * group_input_bytes(unit, images)).sum();
    let head_graph_bytes = trained.head.iter().map(of_head).sum::<f64>() + targets + exchanged;
    // Gradients exist by parameter and as one flat buffer. Constrained parameters are copied into what was gathered, and kept
    // until they are written back.
    let constrained: f64 =
        trained.head.iter().map(|unit| unit.n_constrained as f64 / unit.n_parts as f64).sum();
    let summed = |unit: &UnitCost| {
        let n_graphs = unit.n_parts * placement.rank_micro_batches;
        partial_sums(n_graphs) as f64 * unit.gathered(placement.group_size)
    };
    let partial: f64 = trained.head.iter().map(summed).sum();
    let in_head = head_graph_bytes + F32 * (2.0 * (sizes.gathered(&trained.head) + constrained) + partial);
    // The trained network with its moments, and the others; a checkpoint leaves out frozen ones.
    let shards = sizes.shards_of(trained);
    let with_moments = (1.0 + model.n_moments as f64) * shards;
    let others = |frozen: bool| -> f64 {
        let others = model.others.iter().filter(|network| frozen || !network.is_frozen);
        others.map(|network| sizes.shards_of(network)).sum()
    };
    let here = if placement.offload { 0.0 } else { 1.0 };
    let largest_shard =
        sizes.largest(&trained.backbone).max(sizes.largest(&trained.head)) / placement.group_size as f64;
    Memory {
        state_bytes: here * F32 * (with_moments + others(true)),
        gradient_bytes: F32 * shards,
        gathered_bytes: sizes.gathered_bytes(),
        input_bytes: F32 * model.pixels * images,
        activation_bytes: inputs + graphs,
        work_bytes: in_head.max(sizes.backward_bytes()),
        checkpoint_bytes: here * F32 * (with_moments + others(false) + largest_shard),
    }
}

/// Bytes of the inputs of a unit with divided columns, for the images of the whole group.
fn group_input_bytes(unit: &UnitCost, images: f64) -> f64 {
    F32 * unit.input.wide * images * unit.n_parts as f64
}

/// A model on a rank.
struct Sizes<'a> {
    model: &'a ModelCost,
    placement: &'a Placement,
}

impl Sizes<'_> {
    /// Number of elements of the unit's buffer.
    fn padded(&self, unit: &UnitCost) -> f64 {
        unit.numel.next_multiple_of(ALIGNMENT * self.placement.group_size) as f64
    }

    fn sum(&self, units: &[UnitCost]) -> f64 {
        units.iter().map(|unit| self.padded(unit)).sum()
    }

    /// Number of elements of what a rank gathers of `units`.
    fn gathered(&self, units: &[UnitCost]) -> f64 {
        units.iter().map(|unit| unit.gathered(self.placement.group_size)).sum()
    }

    fn largest(&self, units: &[UnitCost]) -> f64 {
        units.iter().map(|unit| self.padded(unit)).fold(0.0, f64::max)
    }

    /// Number of elements of two units that follow one another, where that is largest. Units at both ends of a segment may follow one
    /// another as well, which is left out: they are alike except at the borders of a network's stages.
    fn largest_neighbors(&self, units: &[UnitCost]) -> f64 {
        units.windows(2).map(|pair| self.sum(pair)).fold(self.largest(units), f64::max)
    }

    /// Number of elements of this rank's shards of `network`.
    fn shards_of(&self, network: &NetworkCost) -> f64 {
        (self.sum(&network.backbone) + self.sum(&network.head)) / self.placement.group_size as f64
    }

    /// Units of the trained backbone that are computed again, and those that keep their graph.
    fn again_and_kept(&self) -> (&[UnitCost], &[UnitCost]) {
        let units = &self.model.trained.backbone;
        units.split_at(units.len().saturating_sub(self.placement.keep))
    }

    /// Bytes of the unit's input for all images.
    fn input_bytes(&self, unit: &UnitCost) -> f64 {
        unit.input.bytes(self.placement.precision.types()) * self.placement.rank_batch as f64
    }

    /// Bytes of all that the unit is given for all images.
    fn given_bytes(&self, unit: &UnitCost) -> f64 {
        unit.given.bytes(self.placement.precision.types()) * self.placement.rank_batch as f64
    }

    /// Bytes that the first unit of a segment keeps: where every unit keeps its input, those before a part keep what it shares with them.
    fn kept_bytes(&self, unit: &UnitCost) -> f64 {
        if self.placement.segment > 1 { self.given_bytes(unit) } else { self.input_bytes(unit) }
    }

    /// Bytes of gathered units. One rank computes with its own weights, unless it rounds them.
    fn gathered_bytes(&self) -> f64 {
        let (gathers, dtype) = (self.placement.gathers(), self.placement.precision.gathered());
        let of_weight = dtype.size() as f64;
        // All heads are in memory while the next unit is gathered; elsewhere one unit while the next is gathered.
        // A rank that holds all of its columns computes with its own weights.
        let moves = |unit: &&UnitCost| self.placement.offload || unit.n_shards(self.placement.group_size) > 1;
        let arriving = |units: &[UnitCost]| -> f64 {
            units.iter().filter(moves).map(|unit| unit.gathered(self.placement.group_size)).sum()
        };
        let passing_of = |network: &NetworkCost| {
            let (unit, heads) = (of_weight * self.largest(&network.backbone), F32 * arriving(&network.head));
            let with_heads = if gathers { heads } else { 0.0 } + unit;
            with_heads.max(of_weight * self.largest_neighbors(&network.backbone))
        };
        let transient = self.model.networks().map(passing_of).fold(0.0, f64::max);
        match (gathers || dtype != DType::F32, self.placement.sharding) {
            (false, _) => 0.0,
            (true, Sharding::Grad) => of_weight * self.sum(&self.model.trained.backbone) + transient,
            (true, _) => of_weight * self.sum(self.again_and_kept().1) + transient,
        }
    }

    /// Bytes of the backbone's backward pass beyond those of all inputs and kept graphs, at their peak between the last unit and the
    /// first.
    fn backward_bytes(&self) -> f64 {
        let placement = self.placement;
        let (trained, types, images) =
            (&self.model.trained, placement.precision.types(), placement.rank_batch as f64);
        let (again, kept) = self.again_and_kept();
        let micro_batch = images / placement.rank_micro_batches.max(1) as f64;
        // Every worker has the gradients of its slice, by parameter, beside the sums of earlier micro-batches; at the end
        // there are the sum of all and a copy of it as one flat buffer, in the type in which it is sent. Where that is not f32,
        // each parameter's sum is freed when it has been rounded.
        let sums = F32 * (placement.workers + partial_sums(placement.rank_micro_batches)) as f64;
        let of_gradient = placement.precision.reduce.dtype().size() as f64;
        let at_end = if of_gradient < F32 { F32 + of_gradient / 2.0 } else { F32 + of_gradient };
        let of_unit = |unit: &UnitCost| sums.max(at_end) * self.padded(unit);
        // `freed` is what the units behind held.
        let (mut freed, mut peak) = (0.0, 0.0_f64);
        for unit in kept.iter().rev() {
            peak = peak.max(of_unit(unit) - freed);
            freed += unit.graph.bytes(types) * images;
        }
        let segments = placement.segments(&trained.backbone);
        for (number, unit) in again.iter().enumerate().rev() {
            if segments.keeps_input(number + 1) {
                // The inputs of its segment, which the first run has not kept.
                let start = number - number % segments.len;
                freed -= again[start + 1..=number].iter().map(|unit| self.input_bytes(unit)).sum::<f64>();
            }
            // Between the stages of a unit, and between parts, the gradients at its output and its input are of all images.
            let output = trained.backbone.get(number + 1).map_or(0.0, |next| self.given_bytes(next));
            let at_once = if unit.n_sums > 0 { images } else { micro_batch };
            let at_ends = match unit.n_sums > 0 || unit.given != unit.input {
                true => output + self.given_bytes(unit),
                false => 0.0,
            };
            peak = peak.max(unit.graph.bytes(types) * at_once + at_ends + of_unit(unit) - freed);
            freed +=
                if segments.keeps_input(number) { self.kept_bytes(unit) } else { self.input_bytes(unit) };
        }
        // At the start the head's gradients are in transfer; at the end all shards exist.
        let head = self.gathered(&trained.head);
        let largest = trained.head.iter().map(|unit| unit.gathered(placement.group_size)).fold(0.0, f64::max);
        let in_transfer = if placement.world_size > 1 { head + largest } else { head };
        peak + F32 * in_transfer.max(self.shards_of(trained))
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
    let set = [plan.recipe.run.keep, plan.recipe.run.segment];
    (plan.keep, plan.segment) = retention(&model, &placement, room.bytes, set);
    let keep = plan.keep.min(model.trained.backbone.len());
    let peak_bytes = memory(&model, &Placement { keep, segment: plan.segment, ..placement }).peak_bytes();
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

/// Lengths of segments from which one is chosen.
const SEGMENTS: [usize; 9] = [1, 2, 3, 4, 6, 8, 12, 16, 24];

/// Multiple of the rank's memory above which a plan is refused. The margin allows for memory that other processes
/// free, and for errors of the estimate.
const MAX_OVERCOMMIT: f64 = 1.5;

/// Returns how many units keep their graph, and how many of the others are computed again together, so that a step fits into `bytes` of a
/// rank's memory: the shortest segments with which it fits at all, because longer ones take more time, and then as many graphs as fit. `set`
/// has the numbers that are not to be chosen.
pub fn retention(
    model: &ModelCost,
    placement: &Placement,
    bytes: f64,
    [keep, segment]: [Option<usize>; 2],
) -> (usize, usize) {
    let n_units = model.trained.backbone.len();
    let graphs = |segment: usize| {
        let placement = Placement { segment, ..*placement };
        match keep {
            Some(keep) => {
                let placement = Placement { keep: keep.min(n_units), ..placement };
                (memory(model, &placement).needed_bytes() <= bytes).then_some(keep)
            }
            None => max_kept_graphs(model, &placement, bytes),
        }
    };
    let lengths: Vec<usize> = match segment {
        Some(segment) => vec![segment],
        // Beyond the root of the number of units, inputs within a segment are more than those of all segments.
        None => SEGMENTS.into_iter().filter(|length| *length == 1 || length * length <= n_units).collect(),
    };
    let fitting = lengths.iter().find_map(|length| Some((graphs(*length)?, *length)));
    fitting.unwrap_or_else(|| {
        let peak = |length: &usize| {
            let placement =
                Placement { keep: keep.unwrap_or(0).min(n_units), segment: *length, ..*placement };
            memory(model, &placement).needed_bytes()
        };
        let least = lengths.iter().min_by(|a, b| peak(a).total_cmp(&peak(b)));
        (keep.unwrap_or(0), least.copied().unwrap_or(1))
    })
}

/// Returns the largest number of units that can keep their graph within `bytes` of a rank's memory; `None` if even 0
/// does not fit.
fn max_kept_graphs(model: &ModelCost, placement: &Placement, bytes: f64) -> Option<usize> {
    let fits = |keep: usize| memory(model, &Placement { keep, ..*placement }).needed_bytes() <= bytes;
    let n_units = model.trained.backbone.len();
    if fits(n_units) {
        return Some(n_units);
    }
    // More graphs take more memory, and there may be thousands of units.
    let (mut most, mut too_many) = (fits(0).then_some(0)?, n_units);
    while most + 1 < too_many {
        let keep = usize::midpoint(most, too_many);
        if fits(keep) { most = keep } else { too_many = keep }
    }
    Some(most)
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
