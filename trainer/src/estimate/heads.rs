//! Memory of the heads and the loss.

use std::collections::BTreeSet;

use ranks::ordered::n_partial_sums;

use super::placed::{F32, PlacedModel};
use crate::cost::UnitCost;

/// Returns the most bytes of heads and loss at a time: while the loss is prepared, in the graphs
/// with the gradients of units, or in the backward pass through units before divided ones.
pub(super) fn head_bytes(placed: PlacedModel<'_>) -> f64 {
    let heads = &placed.model.trained.head;
    // Where columns are divided, graphs are those of the scores of one micro-batch of the group
    // after another; units before them go through the passes of a step, with all images.
    let is_divided = heads.iter().any(|unit| unit.n_parts > 1);
    let staged_images = if is_divided { placed.n_images() } else { placed.micro_batch() };
    let mut inputs = 0.0;
    let mut copies = 0.0;
    let mut graphs_before_scores = 0.0;
    let mut partial_sums = 0.0;
    let mut gradients: Vec<f64> = Vec::new();
    let mut graph_gradients: Vec<f64> = Vec::new();
    for unit in heads {
        let bytes = F32 * placed.gathered(unit);
        gradients.push(bytes);
        // The inputs of the group.
        if unit.n_parts > 1 {
            inputs += group_input_bytes(placed, unit);
        }
        // A copy of each unit with constrained parameters takes the place of what was gathered.
        if unit.n_constrained > 0 {
            copies += bytes;
        }
        if unit.n_columns == 0 {
            graphs_before_scores += placed.graph_bytes(unit, staged_images);
        }
        if unit.n_columns > 0 || !is_divided {
            let n_graphs = unit.n_parts * placed.placement.rank_micro_batches;
            partial_sums += n_partial_sums(n_graphs) as f64 * bytes;
            graph_gradients.push(bytes);
        }
    }
    // Gradients exist by parameter and as one flat buffer of a unit after another.
    let gradient_sum: f64 = graph_gradients.iter().sum();
    let graphs = graphs_before_scores + score_graph_bytes(placed).max(gradient_sum);
    let in_graphs = partial_sums + graphs.max(gradient_sum + largest(&graph_gradients));
    let in_passes = gradients.iter().sum::<f64>() + largest(&gradients).max(graphs_before_scores);
    let targets = Targets::new(placed);
    // The gradients at the inputs of the group are listed, joined, sent and received.
    let backward = targets.bytes + (in_graphs + 4.0 * inputs).max(in_passes);
    inputs + copies + backward.max(targets.preparation_bytes)
}

fn largest(bytes: &[f64]) -> f64 {
    bytes.iter().copied().fold(0.0, f64::max)
}

/// Scores that a unit computes for the views or the masked cells of one size.
struct Scores<'a> {
    unit: &'a UnitCost,
    bytes: f64,
    /// Bytes that stay until the gradients of the unit are computed. Otherwise the gradient at the
    /// scores takes their place.
    staying_bytes: f64,
    /// Bytes of a copy of divided scores, which gets one more column; the gradient at the columns
    /// without it is another copy.
    copy_bytes: f64,
    /// Whether what they are computed from is cut from one tensor for views and masked cells.
    is_cut: bool,
}

/// Returns the most bytes of a micro-batch's scores and the gradients from them. The backward pass
/// runs operations farthest from the graph's leaves first, and what cut scores are computed from is
/// one operation farther. The gradients at all cut scores come first. Then, for one tensor of them
/// after another, come the gradients of parameters and input, after which scores and gradient are
/// freed. Other scores follow in the same way.
fn score_graph_bytes(placed: PlacedModel<'_>) -> f64 {
    let mut all = Vec::new();
    for unit in placed.model.trained.head.iter().filter(|unit| unit.n_columns > 0) {
        for parts in &unit.outputs {
            for part in parts {
                let bytes = placed.part_bytes(part, placed.micro_batch()) / unit.n_parts as f64;
                let staying_bytes = if unit.holds_output { bytes } else { 0.0 };
                let copy_bytes = if unit.n_parts > 1 { bytes } else { 0.0 };
                let is_cut = parts.len() > 1;
                // A head on masked cells scores none of the other view sizes.
                if bytes > 0.0 {
                    all.push(Scores { unit, bytes, staying_bytes, copy_bytes, is_cut });
                }
            }
        }
    }
    let mut in_use: f64 = all.iter().map(|scores| scores.bytes).sum();
    let mut peak = in_use + all.iter().map(|scores| scores.copy_bytes).sum::<f64>();
    let mut have_gradient = BTreeSet::new();
    for is_cut in [true, false] {
        let group: Vec<&Scores<'_>> = all.iter().filter(|scores| scores.is_cut == is_cut).collect();
        in_use += group.iter().map(|scores| scores.staying_bytes).sum::<f64>();
        peak = peak.max(in_use);
        for scores in group.into_iter().rev() {
            let parameter_bytes = F32 * placed.gathered(scores.unit);
            peak = peak.max(in_use + scores.copy_bytes);
            in_use += parameter_bytes - scores.staying_bytes;
            peak = peak.max(in_use);
            in_use -= scores.bytes;
            // The gradient of parameters is added to that from other scores of the unit.
            if !have_gradient.insert(&scores.unit.name) {
                in_use -= parameter_bytes;
            }
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
        let mut inputs = 0.0;
        let mut targets: Vec<f64> = Vec::new();
        for unit in placed.others().flat_map(|network| &network.head).filter(|unit| unit.n_columns > 0) {
            // Targets are made of all scores of another network.
            targets.extend(score_bytes(placed, unit));
            if unit.n_parts > 1 {
                inputs += group_input_bytes(placed, unit);
            }
        }
        let mut scores: f64 = targets.iter().sum();
        for unit in placed.model.trained.head.iter().filter(|unit| unit.runs_twice && unit.n_columns > 0) {
            // Of the trained network's, they are made of those for views of the first size.
            let bytes = score_bytes(placed, unit);
            scores += bytes.iter().sum::<f64>();
            targets.extend(bytes.first());
        }
        let bytes: f64 = targets.iter().sum();
        Self { bytes, preparation_bytes: scores + inputs + bytes + largest(&targets) }
    }
}

/// Returns the bytes of the scores of a unit, by view size and part. Of divided columns, a rank has
/// its part for the images of the whole group.
fn score_bytes(placed: PlacedModel<'_>, unit: &UnitCost) -> Vec<f64> {
    let n_parts = unit.n_parts as f64;
    let n_images = placed.n_images() * n_parts;
    unit.outputs.iter().flatten().map(|part| placed.part_bytes(part, n_images) / n_parts).collect()
}

/// Bytes of the inputs of a unit with divided columns, for the images of the whole group.
fn group_input_bytes(placed: PlacedModel<'_>, unit: &UnitCost) -> f64 {
    let n_images = placed.n_images() * unit.n_parts as f64;
    F32 * unit.input.wide * n_images * placed.high_ratio(unit.masked_share, n_images)
}
