//! What a model costs, unit by unit, as the units themselves say.

use std::collections::BTreeMap;

use networks::backbone::ModelConfig;
use networks::head::{Head, On, Reads, readout};
use networks::unit::{Cost, GroupShape, Unit};

use crate::error::TrainError;
use crate::method::Method;
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
    /// The same for those of the followers.
    pub follower_flops: f64,
    /// Elements of its input, for the student's views: what stays until it runs again.
    pub input: f64,
    /// Elements that its graph holds.
    pub graph: f64,
    /// Whether it needs statistics over the batch: all micro-batches of a rank then go through it together.
    pub staged: bool,
}

/// A model with its heads.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelCost {
    /// Its name.
    pub name: String,
    /// Units of the backbone.
    pub backbone: Vec<UnitCost>,
    /// Units of the heads.
    pub head: Vec<UnitCost>,
    /// Networks that follow the student.
    pub n_followers: usize,
    /// Numbers that the optimizer keeps for each parameter.
    pub n_moments: usize,
    /// Elements of pixels of one image.
    pub pixels: f64,
}

impl ModelCost {
    /// Elements of all parameters.
    pub fn numel(&self) -> usize {
        self.units().map(|unit| unit.numel).sum()
    }

    /// Backbone, then heads.
    pub fn units(&self) -> impl Iterator<Item = &UnitCost> {
        self.backbone.iter().chain(&self.head)
    }
}

/// The costs of `plan`'s model and heads, with its views.
///
/// # Errors
/// [`TrainError::Recipe`] when the method cannot be built.
pub fn of_plan(plan: &Plan) -> Result<ModelCost, TrainError> {
    let method = plan.method()?;
    let n_moments = plan.optimizer().moments().len();
    Ok(of_parts(&plan.recipe.name, &plan.recipe.model, method.as_ref(), n_moments))
}

/// The costs of `model` under `method` and an optimizer of `n_moments`.
pub(super) fn of_parts(name: &str, model: &ModelConfig, method: &dyn Method, n_moments: usize) -> ModelCost {
    let cell_px = model.cell_px();
    let shapes: Vec<GroupShape> = method
        .views()
        .groups()
        .iter()
        .map(|group| GroupShape {
            n_views: group.n_views,
            n_prefix: 0,
            grid: [group.size_px as usize / cell_px; 2],
            width: 3 * cell_px * cell_px,
        })
        .collect();
    let seen = |sizes: &[usize]| -> Vec<GroupShape> { sizes.iter().map(|size| shapes[*size]).collect() };
    let (followers, heads) = (method.followers(), method.heads());
    let units = model.units(readout(&heads));
    let student = pass(&units, &heads, seen(&method.student_sees()), On::Student);
    let follows: Vec<Passed> =
        followers.iter().map(|follower| pass(&units, &heads, seen(&follower.sees), On::Both)).collect();
    let cost = |unit: &dyn Unit| {
        let Entered { cost, input } = student[unit.name()];
        let of_followers = follows.iter().filter_map(|passed| passed.get(unit.name()));
        UnitCost {
            name: unit.name().to_string(),
            numel: unit.params().iter().map(|spec| spec.numel()).sum(),
            student_flops: cost.flops,
            follower_flops: of_followers.map(|entered| entered.cost.flops).sum(),
            input,
            graph: cost.graph,
            staged: unit.n_stages() > 1,
        }
    };
    let pixels = |shape: &GroupShape| (shape.n_rows() * shape.width) as f64;
    let mut backbone: Vec<UnitCost> = units.iter().map(|unit| cost(unit.as_ref())).collect();
    if let Some(first) = backbone.first_mut() {
        // Pixels are kept once, whatever units do.
        first.input = 0.0;
    }
    ModelCost {
        name: name.to_string(),
        backbone,
        head: heads.iter().flat_map(|head| &head.units).map(|unit| cost(unit.as_ref())).collect(),
        n_followers: followers.len(),
        n_moments,
        pixels: shapes.iter().map(pixels).sum(),
    }
}

/// What a unit met.
#[derive(Clone, Copy)]
struct Entered {
    cost: Cost,
    /// Elements of its input.
    input: f64,
}

/// By name of the unit.
type Passed = BTreeMap<String, Entered>;

/// One image's views through backbone and heads.
fn pass(units: &[Box<dyn Unit>], heads: &[Head], shapes: Vec<GroupShape>, of: On) -> Passed {
    let mut passed = Passed::new();
    let mut through = |units: &[Box<dyn Unit>], mut shapes: Vec<GroupShape>| {
        for unit in units {
            let input = shapes.iter().map(|shape| (shape.n_rows() * shape.width) as f64).sum();
            let (cost, outputs) = unit.cost(&shapes);
            passed.insert(unit.name().to_string(), Entered { cost, input });
            shapes = outputs;
        }
        shapes
    };
    let features = through(units, shapes);
    let mut given = BTreeMap::<&str, Vec<GroupShape>>::new();
    for head in heads.iter().filter(|head| of == On::Student || head.on == On::Both) {
        let input = match head.reads {
            Reads::Pooled => features.iter().map(GroupShape::pooled).collect(),
            Reads::Patches => features.iter().map(|shape| GroupShape { n_prefix: 0, ..*shape }).collect(),
            Reads::Head(name) => given.get(name).cloned().unwrap_or_default(),
        };
        given.insert(head.name, through(&head.units, input));
    }
    passed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Recipe;

    /// The toy's head on patches sees all tokens of a view, its head on pooled features one.
    #[test]
    fn heads_on_patches_are_not_free() {
        let text = "name = 't'\nseed = 0\n[model]\narch = 'vit'\nimage_px = 16\npatch_px = 4\nwidth = 8\ndepth = 1\nheads = 2\n\
                    [method]\nname = 'toy'\nscores = 5\n[views]\npreset = 'dino'\nglobal_px = 16\nlocal_px = 8\nn_local = 2\n\
                    [optim]\nbatch_size = 4\nlength = { steps = 2 }\nlr = 0.1\nwarmup = { steps = 0 }\n[teacher]\ndecay = [0.9, 1.0]\n";
        let plan = Plan::resolve(Recipe::parse(text, "t", &[]).unwrap(), 8).unwrap();
        let cost = of_plan(&plan).unwrap();
        let flops = |name: &str| cost.head.iter().find(|unit| unit.name == name).unwrap().student_flops;
        // Two views of 16 cells and two of four, in place of four vectors.
        assert_eq!(flops("cells.mlp"), flops("scores.mlp") * 40.0 / 4.0);
    }
}
