//! Memory of the heads and the loss.

use std::collections::BTreeSet;

use super::UnitCost;
use super::backward::partial_sums;
use super::placed::{F32, PlacedModel};

/// Returns the most bytes of heads and loss at a time: while the loss is prepared, in the graphs
/// with the gradients of units, or in the backward pass through units before divided ones.
pub(super) fn head_bytes(placed: PlacedModel<'_>) -> f64 {
    let heads = placed.heads();
    let images = placed.n_images();
    // The inputs of the group, and the gradients at them, which are listed, joined, sent and
    // received.
    let inputs: f64 = heads
        .iter()
        .filter(|unit| unit.n_parts > 1)
        .map(|unit| group_input_bytes(placed, unit, images))
        .sum();
    // A copy of each unit with constrained parameters takes the place of what was gathered.
    let constrained = heads.iter().filter(|unit| unit.n_constrained > 0);
    let copies: f64 = constrained.map(|unit| placed.gathered(unit)).sum();
    let targets = Targets::of(placed);
    let in_graphs = targets.bytes + (graph_bytes(placed) + 4.0 * inputs).max(staged_bytes(placed));
    inputs + F32 * copies + in_graphs.max(targets.preparation_bytes)
}

/// Returns the bytes of the constrained values of heads, as they were and as they are, which stay
/// until they are written back.
pub(super) fn constrained_value_bytes(placed: PlacedModel<'_>) -> f64 {
    placed.heads().iter().map(|unit| 2.0 * F32 * unit.n_constrained as f64 / unit.n_parts as f64).sum()
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

/// Returns the most bytes of the graphs of the heads in use at a time, with the gradients from
/// them. Where columns are divided, those are the graphs of one micro-batch of the group after
/// another; units before them go through the passes of a step, with all images.
fn graph_bytes(placed: PlacedModel<'_>) -> f64 {
    let heads = placed.heads();
    let placement = placed.placement;
    let (scoring, others): (Vec<&UnitCost>, Vec<&UnitCost>) =
        heads.iter().partition(|unit| unit.n_columns > 0);
    // A head on masked cells scores none of the other view sizes.
    let all: Vec<Scores> = scoring
        .iter()
        .enumerate()
        .flat_map(|(number, unit)| scores(placed, number, unit))
        .filter(|scores| scores.bytes > 0.0)
        .collect();
    let in_graph = if is_divided(placed) { scoring } else { heads.iter().collect() };
    let [gradients, largest] = gradient_bytes(placed, &in_graph);
    let graphs = other_graph_bytes(placed, &others) + scoring_bytes(&all).max(gradients);
    // Gradients exist by parameter and as one flat buffer of a unit after another.
    in_graph
        .iter()
        .map(|unit| {
            let n_graphs = unit.n_parts * placement.rank_micro_batches;
            partial_sums(n_graphs) as f64 * F32 * placed.gathered(unit)
        })
        .sum::<f64>()
        + graphs.max(gradients + largest)
}

/// Returns the most bytes of the backward pass through the units before divided ones; 0 where none
/// are divided.
fn staged_bytes(placed: PlacedModel<'_>) -> f64 {
    if !is_divided(placed) {
        return 0.0;
    }
    let all: Vec<&UnitCost> = placed.heads().iter().collect();
    let others: Vec<&UnitCost> = all.iter().copied().filter(|unit| unit.n_columns == 0).collect();
    let [gradients, largest] = gradient_bytes(placed, &all);
    gradients + largest.max(other_graph_bytes(placed, &others))
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

/// Returns the bytes of the gradients of these units' parameters, and of the largest.
fn gradient_bytes(placed: PlacedModel<'_>, units: &[&UnitCost]) -> [f64; 2] {
    let each = || units.iter().map(|unit| F32 * placed.gathered(unit));
    [each().sum(), each().fold(0.0, f64::max)]
}

/// Scores of the unit of this number for a micro-batch, in the order in which they are computed.
fn scores(placed: PlacedModel<'_>, number: usize, unit: &UnitCost) -> Vec<Scores> {
    let of_part = |bytes: f64, is_cut: bool| Scores {
        bytes: bytes / unit.n_parts as f64,
        unit: number,
        stay: unit.holds_output,
        is_divided: unit.n_parts > 1,
        is_cut,
        parameter_bytes: F32 * placed.gathered(unit),
    };
    placed
        .output_bytes(unit, placed.micro_batch())
        .into_iter()
        .flat_map(|parts| {
            let is_cut = parts.len() > 1;
            parts.into_iter().map(move |bytes| of_part(bytes, is_cut)).collect::<Vec<_>>()
        })
        .collect()
}

/// Returns the most bytes of all scores and the gradients from them. The backward pass runs
/// operations farthest from the graph's leaves first, and what cut scores are computed from is one
/// operation farther. The gradients at all cut scores come first. Then, for one tensor of them
/// after another, come the gradients of parameters and input, after which scores and gradient are
/// freed. Other scores follow in the same way.
fn scoring_bytes(all: &[Scores]) -> f64 {
    let mut in_use = all.iter().map(|scores| scores.bytes).sum::<f64>();
    let copies = all.iter().filter(|scores| scores.is_divided).map(|scores| scores.bytes);
    let mut peak = in_use + copies.sum::<f64>();
    let mut have_gradient = BTreeSet::new();
    for is_cut in [true, false] {
        let these = || all.iter().filter(|scores| scores.is_cut == is_cut);
        in_use += these().filter(|scores| scores.stay).map(|scores| scores.bytes).sum::<f64>();
        peak = peak.max(in_use);
        for scores in these().rev() {
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
    fn of(placed: PlacedModel<'_>) -> Self {
        let images = placed.n_images();
        let networks = placed.model.others.iter().filter(|network| network.computes());
        let others = networks.flat_map(|network| &network.head).filter(|unit| unit.n_columns > 0);
        let of_others: Vec<&UnitCost> = others.collect();
        let of_trained = || placed.model.run_twice().filter(|unit| unit.n_columns > 0);
        // Of divided columns, a rank has its part for the images of the whole group.
        let score_bytes = |unit: &UnitCost| {
            let n_parts = unit.n_parts as f64;
            let mut bytes = placed.output_bytes(unit, images * n_parts).concat();
            bytes.iter_mut().for_each(|bytes| *bytes /= n_parts);
            bytes
        };
        // Targets are made of all scores of another network, and of those of the trained one for
        // views of the first size.
        let targets = || {
            let all = of_others.iter().copied().flat_map(score_bytes);
            all.chain(of_trained().filter_map(|unit| score_bytes(unit).first().copied()))
        };
        let divided = of_others.iter().filter(|unit| unit.n_parts > 1);
        let inputs: f64 = divided.map(|unit| group_input_bytes(placed, unit, images)).sum();
        let all_scores: f64 = of_others.iter().copied().chain(of_trained()).flat_map(score_bytes).sum();
        let bytes: f64 = targets().sum();
        let preparation_bytes = all_scores + inputs + bytes + targets().fold(0.0, f64::max);
        Self { bytes, preparation_bytes }
    }
}

/// Bytes of the inputs of a unit with divided columns, for the images of the whole group.
fn group_input_bytes(placed: PlacedModel<'_>, unit: &UnitCost, images: f64) -> f64 {
    let of_group = images * unit.n_parts as f64;
    F32 * unit.input.wide * of_group * placed.high_ratio(unit.masked_share, of_group)
}
