//! Costs of a model, unit by unit, as stated by the units themselves.

use std::collections::BTreeMap;
use std::ops::Add;

use augment::GroupSpec;
use kernels::ops::ProductLimits;
use networks::adapter::{Adapter, base_params};
use networks::backbone::ModelConfig;
use networks::divided::{divided, numel};
use networks::head::{Head, staged_units};
use networks::layout::ALIGNMENT;
use networks::mask::{MaskRule, MaskedCount, Masking};
use networks::params::ParamSpec;
use networks::patches::{PixelInput, Pixels};
use networks::unit::{Elements, GroupShape, Unit};

use super::head_rows::{HeadRows, OutputPart, masked_share};
use super::parameters::{gradients_at_once, product_limits};
use crate::error::TrainError;
use crate::method::network::{NetworkSpec, UpdateRule, find_trained};
use crate::method::{Collective, Method};
use crate::recipe::plan::Plan;

/// A unit's size, and its cost for one image with all views that its network sees.
#[derive(Debug, Clone, PartialEq)]
pub struct UnitCost {
    /// Name of the unit.
    pub name: String,
    /// Number of elements of its parameters, without adapters.
    pub numel: usize,
    /// Number of elements of its adapters, which are trained in place of its parameters; 0 if it
    /// has none, and nothing of it is trained. Absent in a network without adapters.
    pub n_adapters: Option<usize>,
    /// Floating-point operations of its forward pass: two per multiply-add.
    pub flops: f64,
    /// Elements of its input that the unit before it has computed, which is kept until the unit
    /// runs again.
    pub input: Elements,
    /// Elements of all that it is given: of a part of a divided unit, also what earlier parts have
    /// computed.
    pub given: Elements,
    /// Elements that its graph holds.
    pub graph: Elements,
    /// Elements of gradients within the unit that the backward pass holds beside the graph.
    pub inner_gradients: Elements,
    /// Elements in f32 that the loss of its output holds on a GPU.
    pub loss_elements: f64,
    /// Parts of its output, by view size, if it is the last unit of a head.
    pub outputs: Vec<Vec<OutputPart>>,
    /// Share of its rows that are masked cells, whose number differs from batch to batch.
    pub masked_share: f64,
    /// Whether its graph holds the output.
    pub holds_output: bool,
    /// Number of elements that are constrained before a step.
    pub n_constrained: usize,
    /// Limits of its products with weights, for one image.
    pub products: ProductLimits,
    /// Largest number of elements of its parameters' gradients at a time while its backward pass
    /// runs, which reorders gradients of kernels.
    pub gradients_at_once: usize,
    /// Number of times that the unit waits for a sum over the whole batch in a pass, such as the
    /// statistics of a batch normalization. If it does, all micro-batches of a rank go through it
    /// together.
    pub n_sums: usize,
    /// Number of ranks among which its columns are divided; 1 where every rank computes all of
    /// them.
    pub n_parts: usize,
    /// Number of columns of its output, if ranks may divide them; 0 if they may not.
    pub n_columns: usize,
    /// True if the unit runs a second time, without a graph, for the collectives of the method.
    pub runs_twice: bool,
}

/// A network with its heads.
#[derive(Debug, Clone, PartialEq)]
pub struct NetworkCost {
    /// Name of the network.
    pub name: String,
    /// True if the weights come from a file and stay as they are; checkpoints leave such a network
    /// out.
    pub is_frozen: bool,
    /// Units of the backbone.
    pub backbone: Vec<UnitCost>,
    /// Units of the heads.
    pub head: Vec<UnitCost>,
}

/// All networks of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelCost {
    /// Name of the run or the preset.
    pub name: String,
    /// The trained network.
    pub trained: NetworkCost,
    /// Number of units at the beginning of its backbone that are never trained.
    pub n_fixed: usize,
    /// The other networks.
    pub others: Vec<NetworkCost>,
    /// Number of moments that the optimizer keeps for each parameter.
    pub n_moments: usize,
    /// Elements of the pixels of one image's views, counted once for each form in which networks
    /// take them.
    pub pixels: f64,
    /// Collectives of the method, for which the loss waits.
    pub collectives: Vec<Collective>,
    /// Number of masked cells of an image, if the method masks any.
    pub masked: Option<MaskedCount>,
}

impl UnitCost {
    /// Returns the number of elements of the parameters of all `units`.
    pub fn total_numel(units: &[Self]) -> usize {
        units.iter().map(|unit| unit.numel).sum()
    }

    /// Returns the number of elements that are trained, or that follow those of another network.
    pub fn n_trained(&self) -> usize {
        self.n_adapters.unwrap_or(self.numel)
    }

    /// Returns whether adapters are added to some of its weights.
    pub fn has_adapters(&self) -> bool {
        self.n_adapters.is_some_and(|n_adapters| n_adapters > 0)
    }

    /// Returns a unit that costs nothing.
    #[cfg(test)]
    pub(crate) fn empty(name: &str) -> Self {
        let nothing = Elements::default();
        Self {
            name: name.into(),
            numel: 0,
            n_adapters: None,
            flops: 0.0,
            input: nothing,
            given: nothing,
            graph: nothing,
            inner_gradients: nothing,
            loss_elements: 0.0,
            outputs: Vec::new(),
            masked_share: 0.0,
            holds_output: false,
            n_constrained: 0,
            products: ProductLimits::default(),
            gradients_at_once: 0,
            n_sums: 0,
            n_parts: 1,
            n_columns: 0,
            runs_twice: false,
        }
    }
}

impl NetworkCost {
    /// Returns the number of elements of all parameters, without adapters.
    pub fn numel(&self) -> usize {
        self.units().map(|unit| unit.numel).sum()
    }

    /// Returns the number of elements of all adapters.
    pub fn n_adapters(&self) -> usize {
        self.units().filter_map(|unit| unit.n_adapters).sum()
    }

    /// Returns the number of elements that are trained, or that follow those of another network.
    pub fn n_trained(&self) -> usize {
        self.units().map(UnitCost::n_trained).sum()
    }

    /// Returns the number of elements that a checkpoint holds, without moments.
    fn n_held(&self) -> usize {
        self.numel() + self.n_adapters()
    }

    /// Returns whether the network sees any view; weights of one that does not are never gathered.
    pub fn computes(&self) -> bool {
        self.units().any(|unit| unit.flops > 0.0)
    }

    /// Returns the units of the backbone, then those of the heads.
    pub fn units(&self) -> impl Iterator<Item = &UnitCost> {
        self.backbone.iter().chain(&self.head)
    }
}

impl ModelCost {
    /// Returns a model of one network without heads, and with one moment.
    #[cfg(test)]
    pub(crate) fn with_backbone(backbone: Vec<UnitCost>) -> Self {
        Self {
            name: "model".into(),
            trained: NetworkCost { name: "net".into(), is_frozen: false, backbone, head: Vec::new() },
            n_fixed: 0,
            others: Vec::new(),
            n_moments: 1,
            pixels: 0.0,
            collectives: Vec::new(),
            masked: None,
        }
    }

    /// Returns the model with the columns that may be divided in `n_parts` over the ranks of shard
    /// groups of `group_size`; `None` if there are none, or these numbers do not divide.
    pub fn divided(&self, n_parts: usize, group_size: usize) -> Option<Self> {
        if !self.divides(n_parts, group_size) {
            return None;
        }
        let mut model = self.clone();
        let heads = model.networks_mut().flat_map(|network| &mut network.head);
        for unit in heads.filter(|unit| unit.n_columns > 0) {
            unit.n_parts = n_parts;
        }
        Some(model)
    }

    /// Returns whether there are columns that may be divided in `n_parts` over the ranks of shard
    /// groups of `group_size`.
    pub fn divides(&self, n_parts: usize, group_size: usize) -> bool {
        let mut units =
            self.networks().flat_map(NetworkCost::units).filter(|unit| unit.n_columns > 0).peekable();
        group_size.is_multiple_of(n_parts)
            && units.peek().is_some()
            && units.all(|unit| {
                unit.n_columns.is_multiple_of(n_parts) && unit.numel.is_multiple_of(ALIGNMENT * group_size)
            })
    }

    /// Returns the number of elements of the parameters of the largest unit of a backbone.
    pub fn largest_unit(&self) -> usize {
        self.networks().flat_map(|network| &network.backbone).map(|unit| unit.numel).max().unwrap_or(0)
    }

    /// Returns the number of elements that a checkpoint holds: weights and moments of the trained
    /// network, and weights of the others but frozen ones.
    pub fn checkpoint_numel(&self) -> usize {
        let others = self.others.iter().filter(|network| !network.is_frozen);
        let others: usize = others.map(NetworkCost::n_held).sum();
        self.trained.n_held() + self.n_moments * self.trained.n_trained() + others
    }

    /// Returns the number of ranks among which columns are divided; 1 if none are.
    pub fn n_parts(&self) -> usize {
        self.networks().flat_map(NetworkCost::units).map(|unit| unit.n_parts).max().unwrap_or(1)
    }

    /// Returns the number of elements of all graphs for one image.
    fn graph_elements(&self) -> f64 {
        self.networks().flat_map(NetworkCost::units).map(|unit| unit.graph.total()).sum()
    }

    /// Returns all networks, the trained one first.
    fn networks_mut(&mut self) -> impl Iterator<Item = &mut NetworkCost> {
        std::iter::once(&mut self.trained).chain(&mut self.others)
    }

    /// Returns all networks, the trained one first.
    pub fn networks(&self) -> impl Iterator<Item = &NetworkCost> {
        std::iter::once(&self.trained).chain(&self.others)
    }
}

/// Returns the costs of `plan`'s networks with its views.
///
/// # Errors
/// [`TrainError::Recipe`] when the method cannot be built.
pub fn model_cost(plan: &Plan) -> Result<ModelCost, TrainError> {
    let method = plan.method()?;
    let recipe = &plan.recipe;
    let model = &recipe.model;
    let n_moments = plan.optimizer().moments().len();
    let max_numel = recipe.run.max_unit_parameters;
    let adapter = recipe.optim.adapter;
    let mut choices = Vec::new();
    for (share, views) in plan.view_mix().choices() {
        let views = views.groups();
        let cost = views_cost(&recipe.name, model, method.as_ref(), &views, n_moments, max_numel, adapter);
        choices.push((share, cost));
    }
    Ok(ModelCost { n_fixed: n_fixed(plan, method.as_ref()), ..mixed_cost(&choices) })
}

/// Returns the number of units at the beginning of the trained backbone of `plan` that are never
/// trained, after division.
fn n_fixed(plan: &Plan, method: &dyn Method) -> usize {
    let networks = method.networks();
    let Some(network) = find_trained(&networks) else { return 0 };
    let recipe = &plan.recipe;
    let mut units = Vec::new();
    let mut undivided = Vec::new();
    for part in divided(network.units(&recipe.model), recipe.run.max_unit_parameters) {
        units.push(part.unit);
        undivided.push(part.index);
    }
    let has_adapters = network.adapter(recipe.optim.adapter).is_some();
    plan.step_config().rates.n_fixed_at_start(&units, &undivided, has_adapters)
}

/// Returns the costs of batches that are one of `choices`, by share: the memory of the largest, and
/// the mean time.
fn mixed_cost(choices: &[(f64, ModelCost)]) -> ModelCost {
    let largest = choices.iter().max_by(|a, b| a.1.graph_elements().total_cmp(&b.1.graph_elements()));
    // There is one choice at least.
    let (_, mut mixed) = largest.expect("views").clone();
    for (index, network) in mixed.networks_mut().enumerate() {
        for (position, unit) in network.backbone.iter_mut().chain(&mut network.head).enumerate() {
            unit.flops = 0.0;
            for (share, cost) in choices {
                let same_unit = cost.networks().nth(index).and_then(|network| network.units().nth(position));
                unit.flops += share * same_unit.map_or(0.0, |unit| unit.flops);
            }
        }
    }
    mixed
}

/// Returns the costs of `method`'s networks on `model` for these groups of views. The optimizer
/// keeps `n_moments` for each parameter. Backbone units of more than `max_numel` elements of
/// parameters are divided, if that is given. `adapter` are the adapters of the recipe.
pub(super) fn views_cost(
    name: &str,
    model: &ModelConfig,
    method: &dyn Method,
    views: &[GroupSpec],
    n_moments: usize,
    max_numel: Option<usize>,
    adapter: Option<Adapter>,
) -> ModelCost {
    let specs = method.networks();
    let mut inputs: Vec<PixelInput> = Vec::new();
    let recipe = PixelInput { cell_px: model.cell_px(), pixels: Pixels::default() };
    let mut trained = None;
    let mut others = Vec::new();
    for spec in &specs {
        let cost = network_cost(spec, model, method, views, max_numel, adapter);
        if spec.update_rule == UpdateRule::Gradient {
            trained = Some(cost);
        } else {
            others.push(cost);
        }
        let input = spec.input(recipe.clone());
        if !inputs.contains(&input) {
            inputs.push(input);
        }
    }
    let mut pixels = 0;
    for group in views {
        pixels += group.n_views * model.n_channels() * (group.size_px * group.size_px) as usize;
    }
    let masked = method.masks().map(|rule| {
        let grid = [views[rule.size].size_px as usize / model.cell_px(); 2];
        rule.count(views[rule.size].n_views, grid)
    });
    ModelCost {
        name: name.to_string(),
        // Plans check that each method has exactly one; presets use the same methods.
        trained: trained.expect("a network that is trained by gradient"),
        n_fixed: 0,
        others,
        n_moments,
        pixels: (inputs.len() * pixels) as f64,
        collectives: method.collectives(),
        masked,
    }
}

/// Returns the expected number of cells of a view of the size `size` that have no token in the
/// network `spec`, with masks by `rule`.
fn n_dropped(
    spec: &NetworkSpec,
    size: usize,
    rule: Option<MaskRule>,
    n_views: usize,
    grid: [usize; 2],
) -> usize {
    let seen = spec.sees.iter().find(|views| views.size == size);
    let is_dropped = seen.is_some_and(|views| views.masking == Masking::Dropped);
    match rule.filter(|_| is_dropped) {
        Some(rule) => {
            let n_visible = rule.count(n_views, grid).visible / n_views.max(1) as f64;
            grid[0] * grid[1] - n_visible.round() as usize
        }
        None => 0,
    }
}

/// Returns the costs of the network `spec` of `method` for these groups of views.
fn network_cost(
    spec: &NetworkSpec,
    model: &ModelConfig,
    method: &dyn Method,
    views: &[GroupSpec],
    max_numel: Option<usize>,
    adapter: Option<Adapter>,
) -> NetworkCost {
    let backbone = spec.model(model);
    let cell_px = backbone.cell_px();
    let is_trained = spec.update_rule == UpdateRule::Gradient;
    let mut shapes = Vec::new();
    for size in spec.sizes() {
        let grid = [views[size].size_px as usize / cell_px; 2];
        let n_views = views[size].n_views;
        let rule = method.masks().filter(|rule| rule.size == size);
        shapes.push(GroupShape {
            n_views,
            n_prefix: 0,
            grid,
            n_dropped: n_dropped(spec, size, rule, n_views, grid),
            width: backbone.n_channels() * cell_px * cell_px,
            n_masked: rule.map_or(0, |rule| rule.count(n_views, grid).mean.round() as usize),
            n_mask_blocks: rule.map_or(1, |rule| rule.n_blocks()),
            drops: is_trained,
            is_map: false,
            intermediates: None,
        });
    }
    let units = divided(spec.units(model), max_numel);
    let units: Vec<Box<dyn Unit>> = units.into_iter().map(|part| part.unit).collect();
    let runs_twice = is_trained && method.prepares_with_heads();
    let mut network = units_cost(spec, &units, shapes, method.column_group_size(), runs_twice);
    if let Some(first) = network.backbone.first_mut() {
        // Pixels are counted once, in `ModelCost::pixels`.
        first.input = Elements::default();
        first.given = Elements::default();
    }
    if let Some(adapter) = spec.adapter(adapter) {
        for (cost, unit) in network.backbone.iter_mut().zip(&units) {
            let adapters = adapter.params(unit.as_ref());
            cost.n_adapters = Some(adapters.iter().map(ParamSpec::numel).sum());
            // Those of whole weights, before those of adapters are made of them.
            cost.gradients_at_once = gradients_at_once(&base_params(unit.as_ref()));
        }
    }
    network
}

/// Computes the costs of one image's views in the backbone and the heads of a network. Divided
/// heads have `n_parts` parts. With `runs_twice`, the units of heads that are part of the loss's
/// graph run a second time.
fn units_cost(
    spec: &NetworkSpec,
    backbone: &[Box<dyn Unit>],
    shapes: Vec<GroupShape>,
    n_parts: usize,
    runs_twice: bool,
) -> NetworkCost {
    let (backbone, features) = unit_costs(backbone, shapes);
    let mut heads = Vec::new();
    let mut given = BTreeMap::<&str, Vec<HeadRows>>::new();
    for (Head { name, reads, units, may_divide, .. }, n_staged) in
        spec.heads.iter().zip(staged_units(&spec.heads, n_parts))
    {
        let rows: Vec<HeadRows> = match reads.head().and_then(|head| given.get(head)) {
            Some(rows) => rows.clone(),
            None => features.iter().map(|shape| HeadRows::from_features(*reads, shape)).collect(),
        };
        let (mut costs, shapes) = unit_costs(units, rows.iter().map(|rows| rows.shape).collect());
        for (position, unit) in costs.iter_mut().enumerate() {
            // Heads compute in f32.
            unit.graph = unit.graph.in_f32();
            unit.inner_gradients = unit.inner_gradients.in_f32();
            unit.masked_share = masked_share(&rows);
            unit.runs_twice = runs_twice && position >= n_staged;
        }
        let outputs: Vec<HeadRows> =
            rows.into_iter().zip(shapes).map(|(rows, shape)| HeadRows { shape, ..rows }).collect();
        if let Some(last) = costs.last_mut() {
            last.outputs = outputs.iter().map(|rows| rows.parts(*reads)).collect();
        }
        heads.extend(costs);
        if let Some(last) = heads.last_mut().filter(|_| *may_divide) {
            last.n_parts = n_parts;
            last.n_columns = outputs.first().map_or(0, |rows| rows.shape.width);
        }
        given.insert(name, outputs);
    }
    let is_frozen = spec.update_rule == UpdateRule::Frozen;
    NetworkCost { name: spec.name.to_string(), is_frozen, backbone, head: heads }
}

/// Computes the costs of `units`, one after the other, and the output shapes of the last one.
fn unit_costs(units: &[Box<dyn Unit>], mut shapes: Vec<GroupShape>) -> (Vec<UnitCost>, Vec<GroupShape>) {
    let mut costs = Vec::new();
    for unit in units {
        let input = shapes.iter().map(GroupShape::computed_elements).fold(Elements::default(), Add::add);
        let given = shapes.iter().map(GroupShape::total_elements).fold(Elements::default(), Add::add);
        let (cost, outputs) = unit.cost(&shapes);
        let params = unit.params();
        costs.push(UnitCost {
            name: unit.name().to_string(),
            numel: numel(unit.as_ref()),
            n_adapters: None,
            flops: cost.flops,
            input,
            given,
            graph: cost.graph,
            inner_gradients: cost.inner_gradients,
            loss_elements: cost.loss_elements,
            outputs: Vec::new(),
            masked_share: 0.0,
            holds_output: cost.holds_output,
            n_constrained: params.iter().filter(|spec| spec.is_constrained).map(|spec| spec.numel()).sum(),
            products: product_limits(&params, &shapes),
            gradients_at_once: gradients_at_once(&params),
            n_sums: unit.n_stages() - 1,
            n_parts: 1,
            n_columns: 0,
            runs_twice: false,
        });
        shapes = outputs;
    }
    (costs, shapes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Recipe;

    /// The toy method's head on patches sees all tokens of a view, its head on pooled features one
    /// vector per view.
    #[test]
    fn heads_on_patches_are_not_free() {
        let text = "name = 't'\nseed = 0\n[model]\narch = 'vit'\nimage_px = 16\npatch_px = 4\nwidth = 8\ndepth = 1\nheads = 2\n\
                    [method]\nname = 'toy'\nscores = 5\n[views]\npreset = 'dino'\nglobal_px = 16\nlocal_px = 8\nn_local = 2\n\
                    [optim]\nbatch_size = 4\nlength = { steps = 2 }\nlr = 0.1\nwarmup = { steps = 0 }\n";
        let plan = crate::resolve(Recipe::parse(text, "t", &[]).unwrap(), 8).unwrap();
        let cost = model_cost(&plan).unwrap();
        let cells = cost.trained.head.iter().find(|unit| unit.name == "cells.mlp").unwrap();
        let scores = cost.trained.head.iter().find(|unit| unit.name == "scores.mlp").unwrap();
        // Two views of 16 cells and two of 4, against four pooled vectors.
        assert_eq!(cells.flops, scores.flops * 40.0 / 4.0);
    }
}
