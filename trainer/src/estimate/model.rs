//! What a model costs, unit by unit.

use crate::model::backbone::{ModelConfig, Readout, VitConfig};
use crate::model::unit::Unit;
use crate::recipe::plan::Plan;

/// A unit's size, and its cost for one image with all of its views.
#[derive(Debug, Clone, PartialEq)]
pub struct UnitCost {
    /// Name of the unit.
    pub name: String,
    /// Elements of its parameters.
    pub numel: usize,
    /// Multiply-adds of its forward pass, times two, for the student's views.
    pub student_flops: f64,
    /// The same for the teacher's.
    pub teacher_flops: f64,
    /// Elements of its input, for the student's views: what stays until it runs again.
    pub input: f64,
    /// Elements that its graph holds.
    pub graph: f64,
}

/// A model with its head.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelCost {
    /// Its name.
    pub name: String,
    /// Units of the backbone.
    pub backbone: Vec<UnitCost>,
    /// Units of the head.
    pub head: Vec<UnitCost>,
    /// Elements of patch vectors or pixels of one image.
    pub pixels: f64,
}

impl ModelCost {
    /// Elements of all parameters.
    pub fn numel(&self) -> usize {
        self.units().map(|unit| unit.numel).sum()
    }

    /// Backbone, then head.
    pub fn units(&self) -> impl Iterator<Item = &UnitCost> {
        self.backbone.iter().chain(&self.head)
    }
}

/// Views of an image: sequences by length and number, and how many of the first kind the teacher sees.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ViewCounts {
    /// (tokens without class token, views), the teacher's first.
    pub(super) groups: Vec<(usize, usize)>,
}

/// Channels that a block's graph holds for each token, beside the attention weights: its input, both norms
/// in and out, queries, keys and values, what attention and both branches give, and the hidden layer before
/// and after its GELU. Measured with `ocelli bench shard`.
fn graph_channels(width: f64, hidden: f64, hidden_products: f64) -> f64 {
    9.0 * width + hidden_products * hidden
}

/// The costs of a transformer's units. `hidden_products` is the number of matrices of the MLP: two, or three
/// with a gate.
pub(super) fn vit_units(
    config: &VitConfig,
    numels: Vec<(String, usize)>,
    hidden: f64,
    hidden_products: f64,
    views: &ViewCounts,
) -> Vec<UnitCost> {
    let width = config.width as f64;
    let tokens = |group: &(usize, usize)| (group.0 + 1) as f64;
    let sum = |f: &dyn Fn(f64, f64) -> f64, teacher: bool| -> f64 {
        let groups = if teacher { &views.groups[..1] } else { &views.groups[..] };
        groups.iter().map(|group| group.1 as f64 * f(tokens(group), config.heads as f64)).sum()
    };
    let block = |n: f64, _: f64| {
        n * (2.0 * 4.0 * width * width + 2.0 * hidden_products * width * hidden + 4.0 * n * width)
    };
    let graph = |n: f64, heads: f64| n * (graph_channels(width, hidden, hidden_products) + heads * n);
    let patch = (3 * config.patch_px * config.patch_px) as f64;
    let embed = |n: f64, _: f64| 2.0 * n * patch * width;
    let all_tokens = sum(&|n, _| n, false);
    numels
        .into_iter()
        .map(|(name, numel)| {
            let (student_flops, teacher_flops, input, graph) = match name.as_str() {
                name if name.starts_with("blocks.") => {
                    (sum(&block, false), sum(&block, true), all_tokens * width, sum(&graph, false))
                }
                // Patch vectors are kept once, whatever units do.
                ".embed" => (sum(&embed, false), sum(&embed, true), 0.0, 2.0 * all_tokens * width),
                _ => (0.0, 0.0, all_tokens * width, all_tokens * width),
            };
            UnitCost { name, numel, student_flops, teacher_flops, input, graph }
        })
        .collect()
}

/// A head of fully connected layers on the class tokens of `n_student` views.
pub(super) fn head_units(units: &[Box<dyn Unit>], n_student: f64, n_teacher: f64) -> Vec<UnitCost> {
    let cost = |unit: &dyn Unit| {
        let specs = unit.params();
        let matrices = specs.iter().filter(|spec| spec.shape.len() == 2);
        let products: f64 = matrices.clone().map(|spec| spec.numel() as f64).sum();
        // Before and after the activation, or logits, their softmax and their targets.
        let outputs: f64 = matrices.map(|spec| 3.0 * spec.shape[0] as f64).sum();
        UnitCost {
            name: unit.name().to_string(),
            numel: specs.iter().map(|spec| spec.numel()).sum(),
            student_flops: 2.0 * n_student * products,
            teacher_flops: 2.0 * n_teacher * products,
            input: 0.0,
            graph: n_student * outputs,
        }
    };
    units.iter().map(|unit| cost(unit.as_ref())).collect()
}

/// The costs of `plan`'s model and head, with its views.
pub fn of_plan(plan: &Plan) -> ModelCost {
    let ModelConfig::Vit(config) = &plan.recipe.model;
    let multicrop = plan.multicrop();
    let views = ViewCounts {
        groups: multicrop
            .groups()
            .iter()
            .map(|group| ((group.size_px as usize / config.patch_px).pow(2), group.n_views))
            .collect(),
    };
    let units = plan.recipe.model.units(Readout::Class);
    let numels = units
        .iter()
        .map(|unit| (unit.name().to_string(), unit.params().iter().map(|spec| spec.numel()).sum()))
        .collect();
    let hidden = config.mlp_ratio * config.width as f64;
    let n_views = |groups: &[(usize, usize)]| groups.iter().map(|group| group.1).sum::<usize>() as f64;
    let method = plan.recipe.method.build(multicrop, config.width);
    ModelCost {
        name: plan.recipe.name.clone(),
        backbone: vit_units(config, numels, hidden, 2.0, &views),
        head: head_units(&method.head(), n_views(&views.groups), n_views(&views.groups[..1])),
        pixels: views
            .groups
            .iter()
            .map(|(n, views)| (n * views * 3 * config.patch_px * config.patch_px) as f64)
            .sum(),
    }
}
