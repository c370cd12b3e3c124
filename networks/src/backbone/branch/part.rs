//! The unit that computes steps of a branch: all of them, or those of one part.

use std::sync::Arc;

use burn_tensor::Tensor;
use burn_tensor::activation::sigmoid;
use kernels::ops::{Affine, fork, grid_mean, normalize, relu, scale_channels};

use super::shapes::Shapes;
use super::steps::{Branch, NO_MODULE, Product, Step};
use crate::batch_norm::BatchNorm;
use crate::features::{Features, Skip};
use crate::params::ParamSpec;
use crate::unit::{Context, Cost, GroupShape, StageOutput, Unit};

/// Steps of a branch that follow one another: all of them in an undivided branch.
pub(in crate::backbone) struct BranchPart {
    branch: Arc<Branch>,
    name: String,
    /// Steps by stage.
    stages: Vec<Vec<Step>>,
}

/// Message of the panic if a branch's input is missing from its skip connection.
const NO_SKIP: &str = "a branch's first step leaves its input for the last";

/// Divides steps into stages: one ends where the next step needs the statistics of a layer, and at
/// the end of a part those of the shortcut.
fn staged(steps: Vec<Step>) -> Vec<Vec<Step>> {
    let mut stages = vec![Vec::new()];
    let mut has_sums = false;
    for step in steps {
        has_sums |= step.is_last && step.product == Product::Shortcut;
        let ends = step.is_last && matches!(step.product, Product::Layer(_));
        if let Some(stage) = stages.last_mut() {
            stage.push(step);
        }
        if ends {
            stages.push(Vec::new());
            has_sums = false;
        }
    }
    if has_sums {
        stages.push(Vec::new());
    }
    stages
}

impl BranchPart {
    /// Creates the unit that computes all steps of `branch`.
    pub(in crate::backbone) fn undivided(branch: Branch) -> Self {
        let name = branch.name.clone();
        let steps = branch.steps(usize::MAX);
        Self { branch: Arc::new(branch), name, stages: staged(steps) }
    }

    /// Returns the convolutions whose last columns stage `stage` computes, in the order of their
    /// sums.
    fn completed(&self, stage: usize) -> impl Iterator<Item = (Product, &BatchNorm)> {
        let last = self.stages[stage].iter().filter(|step| step.is_last);
        last.filter_map(|step| Some((step.product, &self.branch.layer(step.product)?.norm)))
    }

    /// Splits the totals of stage `stage`, which follow one another, by normalization.
    fn split_totals(&self, stage: usize, totals: &Tensor<1>) -> Vec<Tensor<1>> {
        let mut start = 0;
        self.completed(stage)
            .map(|(_, norm)| {
                let range = start..start + norm.n_sums();
                start = range.end;
                totals.clone().slice([range])
            })
            .collect()
    }

    /// Normalizes what the stage before `stage` has convolved.
    fn normalized(&self, stage: usize, mut group: Features, set: usize, cx: &Context<'_>) -> Features {
        let Some(before) = stage.checked_sub(1) else { return group };
        let totals = cx.totals.get(set).map(|totals| self.split_totals(before, totals));
        for (i, (product, norm)) in self.completed(before).enumerate() {
            let affine = norm.affine(totals.as_ref().map(|totals| totals[i].clone()), cx);
            group = match product {
                Product::Layer(number) if number == self.branch.last() => self.finished(group, affine),
                Product::Layer(_) => {
                    let x = normalize(group.x.clone(), affine, None, true);
                    Features { x, ..group }
                }
                _ => {
                    let Skip { x, grid } = group.skip.expect(NO_SKIP);
                    Features { skip: Some(Skip { x: normalize(x, affine, None, false), grid }), ..group }
                }
            };
        }
        group
    }

    /// Applies the last normalization and the skip connection.
    fn finished(&self, group: Features, affine: Affine) -> Features {
        let y = normalize(group.x, affine, Some(group.skip.expect(NO_SKIP).x), true);
        if self.branch.pools { Features::vectors(grid_mean(y)) } else { Features::on_grid(y, group.grid) }
    }

    /// Computes a step; returns the sums of a convolution with its last columns.
    fn step(&self, step: &Step, group: Features, cx: &Context<'_>) -> (Features, Option<Tensor<1>>) {
        match step.product {
            Product::Layer(number) => self.layer(step, number, group, cx),
            Product::Shortcut => self.shortcut(step, group, cx),
            Product::Squeeze => (self.squeeze(step, group, cx), None),
            Product::Excite => (self.excite(step, group, cx), None),
        }
    }

    fn layer(
        &self,
        step: &Step,
        number: usize,
        mut group: Features,
        cx: &Context<'_>,
    ) -> (Features, Option<Tensor<1>>) {
        let layer = &self.branch.layers[number];
        if number == 0 && step.columns.start == 0 {
            let [x, around] = fork(group.x);
            group = Features { x, skip: Some(Skip { x: around, grid: group.grid }), ..group };
        }
        if !step.is_last {
            let [x, kept] = fork(group.x);
            let (y, _) = layer.columns(x, group.grid, &step.columns, cx);
            group.columns.push(y);
            return (Features { x: kept, ..group }, None);
        }
        let (y, grid) = layer.columns(group.x, group.grid, &step.columns, cx);
        let (x, sums) = layer.moments(joined(group.columns, y), cx);
        (Features { skip: group.skip, ..Features::on_grid(x, grid) }, Some(sums))
    }

    fn shortcut(&self, step: &Step, mut group: Features, cx: &Context<'_>) -> (Features, Option<Tensor<1>>) {
        let layer = self.branch.shortcut.as_ref().expect(NO_MODULE);
        let Skip { x, grid } = group.skip.take().expect(NO_SKIP);
        if !step.is_last {
            let [x, kept] = fork(x);
            group.columns.push(layer.columns(x, grid, &step.columns, cx).0);
            return (Features { skip: Some(Skip { x: kept, grid }), ..group }, None);
        }
        let (y, grid) = layer.columns(x, grid, &step.columns, cx);
        let (x, sums) = layer.moments(joined(group.columns, y), cx);
        (Features { skip: Some(Skip { x, grid }), columns: Vec::new(), ..group }, Some(sums))
    }

    /// Computes columns of the first layer of the excitation; with the last of them, all beside `x`
    /// is its output.
    fn squeeze(&self, step: &Step, mut group: Features, cx: &Context<'_>) -> Features {
        let [x, squeezed] = fork(group.x);
        let y = self.branch.excitation().squeezed(grid_mean(squeezed), cx);
        group.columns = if step.is_last {
            vec![relu(joined(group.columns, y))]
        } else {
            group.columns.into_iter().chain([y]).collect()
        };
        Features { x, ..group }
    }

    /// Computes columns of the second layer of the excitation, whose input is the first tensor
    /// beside `x`.
    fn excite(&self, step: &Step, mut group: Features, cx: &Context<'_>) -> Features {
        let mut before = group.columns.into_iter();
        // A branch with an excitation has the steps of its first layer before those of its second.
        let squeezed = before.next().expect("the squeeze comes before the excitation");
        if !step.is_last {
            let [squeezed, kept] = fork(squeezed);
            let y = self.branch.excitation().excited(squeezed, cx);
            group.columns = [kept].into_iter().chain(before).chain([y]).collect();
            return group;
        }
        let y = self.branch.excitation().excited(squeezed, cx);
        let scale = sigmoid(joined(before.collect(), y));
        Features { x: scale_channels(group.x, scale), columns: Vec::new(), ..group }
    }
}

/// Joins the columns of a product, of which `last` are the last.
fn joined(mut columns: Vec<Tensor<3>>, last: Tensor<3>) -> Tensor<3> {
    if columns.is_empty() {
        return last;
    }
    columns.push(last);
    Tensor::cat(columns, 2)
}

impl Unit for BranchPart {
    fn name(&self) -> &str {
        &self.name
    }

    fn export_name(&self) -> &str {
        &self.branch.name
    }

    fn params(&self) -> Vec<ParamSpec> {
        self.stages.iter().flatten().flat_map(|step| self.branch.params(step)).collect()
    }

    fn n_stages(&self) -> usize {
        self.stages.len()
    }

    fn forward(&self, stage: usize, groups: Vec<Features>, cx: &Context<'_>) -> StageOutput {
        let mut sums = Vec::new();
        let features = groups
            .into_iter()
            .zip(&cx.sets.0)
            .map(|(group, set)| {
                let mut group = self.normalized(stage, group, *set, cx);
                let mut of_group = Vec::new();
                for step in &self.stages[stage] {
                    let of_step;
                    (group, of_step) = self.step(step, group, cx);
                    of_group.extend(of_step);
                }
                match of_group.len() {
                    0 => {}
                    1 => sums.extend(of_group),
                    _ => sums.push(Tensor::cat(of_group, 0)),
                }
                group
            })
            .collect();
        StageOutput { features, sums: cx.sets.sums(sums) }
    }

    fn observe(&self, totals: &[Vec<Tensor<1>>], cx: &Context<'_>) -> Vec<(String, Tensor<1>)> {
        let mut observed = Vec::new();
        for (stage, by_set) in totals.iter().enumerate() {
            let split_totals: Vec<_> = by_set.iter().map(|totals| self.split_totals(stage, totals)).collect();
            for (i, (_, norm)) in self.completed(stage).enumerate() {
                observed.extend(norm.observe(split_totals.iter().map(|parts| parts[i].clone()), cx));
            }
        }
        observed
    }

    fn parts(&self, max_numel: usize) -> Option<Vec<Box<dyn Unit>>> {
        let mut parts: Vec<(Vec<Step>, usize)> = Vec::new();
        for step in self.branch.steps(max_numel) {
            let numel = self.branch.numel(&step);
            match parts.last_mut() {
                Some((steps, sum)) if *sum + numel <= max_numel => {
                    steps.push(step);
                    *sum += numel;
                }
                _ => parts.push((vec![step], numel)),
            }
        }
        let part = |(number, (steps, _)): (usize, (Vec<Step>, usize))| -> Box<dyn Unit> {
            let name = format!("{}/{number}", self.branch.name);
            Box::new(Self { branch: Arc::clone(&self.branch), name, stages: staged(steps) })
        };
        (parts.len() > 1).then(|| parts.into_iter().enumerate().map(part).collect())
    }

    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let steps = || self.stages.iter().flatten();
        let (costs, outputs): (Vec<Cost>, Vec<GroupShape>) = groups
            .iter()
            .map(|shape| {
                let mut shapes = Shapes::of(*shape);
                let cost: Cost = steps().map(|step| shapes.cost(&self.branch, step)).sum();
                let is_end =
                    steps().any(|step| step.is_last && step.product == Product::Layer(self.branch.last()));
                let output = match (is_end, self.branch.pools) {
                    (true, true) => shapes.x.pooled(),
                    (true, false) => GroupShape { beside: None, ..shapes.x },
                    (false, _) => shapes.between_parts(),
                };
                (cost, output)
            })
            .unzip();
        (costs.into_iter().sum(), outputs)
    }
}
