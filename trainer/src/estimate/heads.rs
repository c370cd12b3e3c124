//! Memory of the heads and the loss.

use std::collections::BTreeSet;

use super::gradients::n_partial_sums;
use super::placed::{F32, PlacedModel};
use crate::cost::UnitCost;

/// Returns the most bytes of heads and loss at a time: while the loss is prepared, in the graphs
/// with the gradients of units, or in the backward pass through units before divided ones.
pub(super) fn head_bytes(placed: PlacedModel<'_>) -> f64 {
    let images = placed.n_images();
    let mut inputs = 0.0;
    let mut copies = 0.0;
    for unit in placed.heads() {
        // The inputs of the group, and the gradients at them, which are listed, joined, sent and
        // received.
        if unit.n_parts > 1 {
            inputs += group_input_bytes(placed, unit, images);
        }
        // A copy of each unit with constrained parameters takes the place of what was gathered.
        if unit.n_constrained > 0 {
            copies += F32 * placed.gathered(unit);
        }
    }
    let targets = Targets::new(placed);
    let in_graphs = targets.bytes + (graph_bytes(placed) + 4.0 * inputs).max(staged_bytes(placed));
    inputs + copies + in_graphs.max(targets.preparation_bytes)
}

/// Returns the bytes of the constrained values of heads, as they were and as they are, which stay
/// until they are written back.
pub(super) fn constrained_value_bytes(placed: PlacedModel<'_>) -> f64 {
    let values = placed.heads().iter().map(|unit| unit.n_constrained as f64 / unit.n_parts as f64);
    2.0 * F32 * values.sum::<f64>()
}

/// Scores that a unit computes for the views or the masked cells of one size.
struct Scores {
    bytes: f64,
    /// Number of the unit.
    unit: usize,
    /// Whether they stay until the gradients of the unit are computed. Otherwise the gradient at
    /// them takes their place.
    stay: bool,
    /// Whether a copy of them gets one more column; the gradient at the columns without it is
    /// another copy.
    is_divided: bool,
    /// Whether what they are computed from is cut from one tensor for views and masked cells.
    is_cut: bool,
    /// Bytes of the gradients of the unit's parameters.
    parameter_bytes: f64,
}

/// Bytes of the gradients of the parameters of some units.
struct GradientBytes {
    all: f64,
    /// Those of the largest unit.
    largest: f64,
}

/// Returns the most bytes of the graphs of the heads in use at a time, with the gradients from
/// them. Where columns are divided, those are the graphs of one micro-batch of the group after
/// another; units before them go through the passes of a step, with all images.
fn graph_bytes(placed: PlacedModel<'_>) -> f64 {
    let heads = placed.heads();
    let (scoring, others): (Vec<&UnitCost>, Vec<&UnitCost>) =
        heads.iter().partition(|unit| unit.n_columns > 0);
    let mut all = Vec::new();
    for (number, unit) in scoring.iter().enumerate() {
        push_scores(&mut all, placed, number, unit);
    }
    let in_graph = if is_divided(placed) { scoring } else { heads.iter().collect() };
    let gradients = gradient_bytes(placed, &in_graph);
    let graphs = other_graph_bytes(placed, &others) + scoring_bytes(&all).max(gradients.all);
    let mut sums = 0.0;
    for unit in in_graph {
        let n_graphs = unit.n_parts * placed.placement.rank_micro_batches;
        sums += n_partial_sums(n_graphs) as f64 * F32 * placed.gathered(unit);
    }
    // Gradients exist by parameter and as one flat buffer of a unit after another.
    sums + graphs.max(gradients.all + gradients.largest)
}

/// Returns the most bytes of the backward pass through the units before divided ones; 0 where none
/// are divided.
fn staged_bytes(placed: PlacedModel<'_>) -> f64 {
    if !is_divided(placed) {
        return 0.0;
    }
    let all: Vec<&UnitCost> = placed.heads().iter().collect();
    let others: Vec<&UnitCost> = all.iter().copied().filter(|unit| unit.n_columns == 0).collect();
    let gradients = gradient_bytes(placed, &all);
    gradients.all + gradients.largest.max(other_graph_bytes(placed, &others))
}

/// Returns whether columns are divided.
fn is_divided(placed: PlacedModel<'_>) -> bool {
    placed.heads().iter().any(|unit| unit.n_parts > 1)
}

/// Returns the bytes of the graphs of units before those that score.
fn other_graph_bytes(placed: PlacedModel<'_>, others: &[&UnitCost]) -> f64 {
    let at_once = if is_divided(placed) { placed.n_images() } else { placed.micro_batch() };
    others.iter().map(|unit| placed.graph_bytes(unit, at_once)).sum()
}

/// Returns the bytes of the gradients of these units' parameters.
fn gradient_bytes(placed: PlacedModel<'_>, units: &[&UnitCost]) -> GradientBytes {
    let mut gradients = GradientBytes { all: 0.0, largest: 0.0 };
    for unit in units {
        let bytes = F32 * placed.gathered(unit);
        gradients.all += bytes;
        gradients.largest = gradients.largest.max(bytes);
    }
    gradients
}

/// Adds the scores of unit `number` for a micro-batch, in the order in which they are computed. A
/// head on masked cells scores none of the other view sizes.
fn push_scores(all: &mut Vec<Scores>, placed: PlacedModel<'_>, number: usize, unit: &UnitCost) {
    for parts in placed.output_bytes(unit, placed.micro_batch()) {
        let is_cut = parts.len() > 1;
        for bytes in parts.into_iter().filter(|bytes| *bytes > 0.0) {
            all.push(Scores {
                bytes: bytes / unit.n_parts as f64,
                unit: number,
                stay: unit.holds_output,
                is_divided: unit.n_parts > 1,
                is_cut,
                parameter_bytes: F32 * placed.gathered(unit),
            });
        }
    }
}

/// Returns the most bytes of all scores and the gradients from them. The backward pass runs
/// operations farthest from the graph's leaves first, and what cut scores are computed from is one
/// operation farther. The gradients at all cut scores come first. Then, for one tensor of them
/// after another, come the gradients of parameters and input, after which scores and gradient are
/// freed. Other scores follow in the same way.
fn scoring_bytes(all: &[Scores]) -> f64 {
    let mut in_use: f64 = all.iter().map(|scores| scores.bytes).sum();
    let copies = all.iter().filter(|scores| scores.is_divided).map(|scores| scores.bytes);
    let mut peak = in_use + copies.sum::<f64>();
    let mut have_gradient = BTreeSet::new();
    for is_cut in [true, false] {
        let group: Vec<&Scores> = all.iter().filter(|scores| scores.is_cut == is_cut).collect();
        in_use += group.iter().filter(|scores| scores.stay).map(|scores| scores.bytes).sum::<f64>();
        peak = peak.max(in_use);
        for scores in group.into_iter().rev() {
            peak = peak.max(in_use + if scores.is_divided { scores.bytes } else { 0.0 });
            in_use += scores.parameter_bytes - if scores.stay { scores.bytes } else { 0.0 };
            peak = peak.max(in_use);
            // The gradient of parameters is added to that from other scores of the unit.
            let is_first = have_gradient.insert(scores.unit);
            in_use -= scores.bytes + if is_first { 0.0 } else { scores.parameter_bytes };
        }
    }
    peak
}

/// Memory of targets, which are made of scores without a graph for all images.
struct Targets {
    /// Bytes of the targets.
    bytes: f64,
    /// Bytes while they are made: of all scores, the targets, and the largest of them before its
    /// last change.
    preparation_bytes: f64,
}

impl Targets {
    /// Estimates the memory of targets made of the scores of networks without gradients, and of
    /// those of the trained one. The scores of all networks are there at the same time, with the
    /// inputs of the group where columns are divided.
    fn new(placed: PlacedModel<'_>) -> Self {
        let images = placed.n_images();
        let mut scores = 0.0;
        let mut inputs = 0.0;
        let mut targets = Vec::new();
        for unit in placed.others().flat_map(|network| &network.head).filter(|unit| unit.n_columns > 0) {
            // Targets are made of all scores of another network.
            let bytes = score_bytes(placed, unit, images);
            scores += bytes.iter().sum::<f64>();
            targets.extend(bytes);
            if unit.n_parts > 1 {
                inputs += group_input_bytes(placed, unit, images);
            }
        }
        for unit in placed.model.units_that_run_twice().filter(|unit| unit.n_columns > 0) {
            // Of the trained network's, they are made of those for views of the first size.
            let bytes = score_bytes(placed, unit, images);
            scores += bytes.iter().sum::<f64>();
            targets.extend(bytes.first());
        }
        let bytes: f64 = targets.iter().sum();
        let largest = targets.into_iter().fold(0.0, f64::max);
        Self { bytes, preparation_bytes: scores + inputs + bytes + largest }
    }
}

/// Returns the bytes of the scores of a unit, by view size and part. Of divided columns, a rank has
/// its part for the images of the whole group.
fn score_bytes(placed: PlacedModel<'_>, unit: &UnitCost, images: f64) -> Vec<f64> {
    let n_parts = unit.n_parts as f64;
    let bytes = placed.output_bytes(unit, images * n_parts).concat();
    bytes.into_iter().map(|bytes| bytes / n_parts).collect()
}

/// Bytes of the inputs of a unit with divided columns, for the images of the whole group.
fn group_input_bytes(placed: PlacedModel<'_>, unit: &UnitCost, images: f64) -> f64 {
    let group_images = images * unit.n_parts as f64;
    F32 * unit.input.wide * group_images * placed.high_ratio(unit.masked_share, group_images)
}
