//! The unit that computes steps of a branch: all of them, or those of one part.

use std::sync::Arc;

use burn_tensor::Tensor;
use burn_tensor::activation::sigmoid;
use kernels::ops::{Affine, fork, grid_mean, normalize, relu, scale_channels};

use super::shapes::Shapes;
use super::steps::{Branch, ColumnStep, NO_MODULE, Product};
use crate::batch_norm::BatchNorm;
use crate::params::ParamSpec;
use crate::part_name::part_name;
use crate::tokens::{BranchState, Sequences, Tokens};
use crate::unit::{Context, Cost, GroupShape, StageOutput, Unit};

/// Steps of a branch that follow one another: all of them in an undivided branch.
pub(in crate::backbone) struct BranchPart {
    branch: Arc<Branch>,
    name: String,
    /// Steps by stage.
    stages: Vec<Vec<ColumnStep>>,
}

/// Message of the panic if a branch's input is missing from its skip connection.
const NO_SKIP: &str = "a branch's first step leaves its input for the last";

/// Divides steps into stages. A stage ends with the last step of a layer of the branch, whose
/// statistics the next step needs. If the last steps of a part include the shortcut, they end a
/// stage too.
fn split_into_stages(steps: Vec<ColumnStep>) -> Vec<Vec<ColumnStep>> {
    let mut stages = vec![Vec::new()];
    let mut has_sums = false;
    for step in steps {
        has_sums |= step.is_last && step.product == Product::Shortcut;
        let ends_stage = step.is_last && matches!(step.product, Product::Layer(_));
        if let Some(stage) = stages.last_mut() {
            stage.push(step);
        }
        if ends_stage {
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
        Self { branch: Arc::new(branch), name, stages: split_into_stages(steps) }
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

    /// Normalizes the convolutions that the stage before `stage` has completed.
    fn normalize_previous(&self, stage: usize, mut tokens: Tokens, set: usize, cx: &Context<'_>) -> Tokens {
        let Some(previous) = stage.checked_sub(1) else { return tokens };
        let totals = cx.totals.get(set).map(|totals| self.split_totals(previous, totals));
        for (i, (product, norm)) in self.completed(previous).enumerate() {
            let affine = norm.affine(totals.as_ref().map(|totals| totals[i].clone()), cx);
            tokens = match product {
                Product::Layer(index) if index == self.branch.last() => self.finish(tokens, affine),
                Product::Layer(_) => {
                    let x = normalize(tokens.x.clone(), affine, None, true);
                    Tokens { x, ..tokens }
                }
                _ => {
                    let state = tokens.branch.expect(NO_SKIP);
                    let skip = normalize(state.skip, affine, None, false);
                    Tokens { branch: Some(BranchState { skip, ..state }), ..tokens }
                }
            };
        }
        tokens
    }

    /// Applies the last normalization and the skip connection.
    fn finish(&self, mut tokens: Tokens, affine: Affine) -> Tokens {
        let state = tokens.branch.take().expect(NO_SKIP);
        let y = tokens.with(normalize(tokens.x.clone(), affine, Some(state.skip), true));
        if self.branch.pools { Tokens::vectors(mean_of_cells(&y)) } else { y }
    }

    /// Computes a step; returns the sums of a convolution with its last columns.
    fn step(&self, step: &ColumnStep, tokens: Tokens, cx: &Context<'_>) -> (Tokens, Option<Tensor<1>>) {
        match step.product {
            Product::Layer(index) => self.layer(step, index, tokens, cx),
            Product::Shortcut => self.shortcut(step, tokens, cx),
            Product::Squeeze => (self.squeeze(step, tokens, cx), None),
            Product::Excite => (self.excite(step, tokens, cx), None),
        }
    }

    fn layer(
        &self,
        step: &ColumnStep,
        index: usize,
        mut tokens: Tokens,
        cx: &Context<'_>,
    ) -> (Tokens, Option<Tensor<1>>) {
        let layer = &self.branch.layers[index];
        if index == 0 && step.columns.start == 0 {
            let [x, skip] = fork(tokens.x.clone());
            let state = BranchState { skip, skip_grid: tokens.grid(), columns: Vec::new() };
            tokens = Tokens { x, branch: Some(state), ..tokens };
        }
        let mut state = tokens.branch.take().expect(NO_SKIP);
        if !step.is_last {
            let [x, kept] = fork(tokens.x.clone());
            let (y, _) =
                layer.convolve_columns(tokens.with(x).by_sequence(), tokens.grid(), &step.columns, cx);
            state.columns.push(rows(y));
            return (Tokens { x: kept, branch: Some(state), ..tokens }, None);
        }
        let (y, grid) = layer.convolve_columns(tokens.by_sequence(), tokens.grid(), &step.columns, cx);
        let y = concat_columns(std::mem::take(&mut state.columns), rows(y));
        let (x, sums) = layer.moments(y, cx);
        let maps = Tokens::new(x, vec![Sequences::on_grid(tokens.n_sequences(), grid)]);
        (Tokens { branch: Some(state), ..maps }, Some(sums))
    }

    fn shortcut(
        &self,
        step: &ColumnStep,
        mut tokens: Tokens,
        cx: &Context<'_>,
    ) -> (Tokens, Option<Tensor<1>>) {
        let layer = self.branch.shortcut.as_ref().expect(NO_MODULE);
        let BranchState { skip: x, skip_grid, mut columns } = tokens.branch.take().expect(NO_SKIP);
        let n = tokens.n_sequences();
        if !step.is_last {
            let [x, kept] = fork(x);
            let maps = Tokens::new(x, vec![Sequences::on_grid(n, skip_grid)]);
            let (y, _) = layer.convolve_columns(maps.by_sequence(), skip_grid, &step.columns, cx);
            columns.push(rows(y));
            let state = BranchState { skip: kept, skip_grid, columns };
            return (Tokens { branch: Some(state), ..tokens }, None);
        }
        let maps = Tokens::new(x, vec![Sequences::on_grid(n, skip_grid)]);
        let (y, grid) = layer.convolve_columns(maps.by_sequence(), skip_grid, &step.columns, cx);
        let (skip, sums) = layer.moments(concat_columns(columns, rows(y)), cx);
        let state = BranchState { skip, skip_grid: grid, columns: Vec::new() };
        (Tokens { branch: Some(state), ..tokens }, Some(sums))
    }

    /// Computes columns of the first layer of the excitation. After the last of them, the only
    /// tensor in `columns` is the output of that layer.
    fn squeeze(&self, step: &ColumnStep, mut tokens: Tokens, cx: &Context<'_>) -> Tokens {
        let [x, squeezed] = fork(tokens.x.clone());
        let y = self.branch.excitation().squeezed(mean_of_cells(&tokens.with(squeezed)), cx);
        let mut state = tokens.branch.take().expect(NO_SKIP);
        if step.is_last {
            state.columns = vec![relu(concat_columns(state.columns, y))];
        } else {
            state.columns.push(y);
        }
        Tokens { x, branch: Some(state), ..tokens }
    }

    /// Computes columns of the second layer of the excitation, whose input is the first tensor in
    /// `columns`.
    fn excite(&self, step: &ColumnStep, mut tokens: Tokens, cx: &Context<'_>) -> Tokens {
        let state = tokens.branch.take().expect(NO_SKIP);
        let mut columns = state.columns.into_iter();
        // A branch with an excitation has the steps of its first layer before those of its second.
        let squeezed = columns.next().expect("the squeeze comes before the excitation");
        if !step.is_last {
            let [squeezed, kept] = fork(squeezed);
            let y = self.branch.excitation().excited(squeezed, cx);
            let columns = [kept].into_iter().chain(columns).chain([y]).collect();
            return Tokens { branch: Some(BranchState { columns, ..state }), ..tokens };
        }
        let y = self.branch.excitation().excited(squeezed, cx);
        let scale = sigmoid(concat_columns(columns.collect(), y));
        let x = rows(scale_channels(tokens.by_sequence(), scale.unsqueeze_dim(1)));
        Tokens { x, branch: Some(BranchState { columns: Vec::new(), ..state }), ..tokens }
    }
}

/// Returns the rows of maps of `[B, N, C]`: `[B·N, C]`.
fn rows(maps: Tensor<3>) -> Tensor<2> {
    let [b, n, c] = maps.dims();
    maps.reshape([b * n, c])
}

/// Returns the mean over the cells of each view, `[B·V, C]`.
fn mean_of_cells(maps: &Tokens) -> Tensor<2> {
    grid_mean(maps.by_sequence()).squeeze_dim(1)
}

/// Concatenates the columns of a product, of which `last` are the last.
fn concat_columns(mut columns: Vec<Tensor<2>>, last: Tensor<2>) -> Tensor<2> {
    if columns.is_empty() {
        return last;
    }
    columns.push(last);
    Tensor::cat(columns, 1)
}

impl Unit for BranchPart {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<ParamSpec> {
        self.stages.iter().flatten().flat_map(|step| self.branch.params(step)).collect()
    }

    fn n_stages(&self) -> usize {
        self.stages.len()
    }

    fn forward(&self, stage: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        let mut outputs = Vec::with_capacity(streams.len());
        let mut sums = Vec::new();
        for (tokens, set) in streams.into_iter().zip(&cx.sets.0) {
            let mut tokens = self.normalize_previous(stage, tokens, *set, cx);
            let mut stream_sums = Vec::new();
            for step in &self.stages[stage] {
                let step_sums;
                (tokens, step_sums) = self.step(step, tokens, cx);
                stream_sums.extend(step_sums);
            }
            match stream_sums.len() {
                0 => {}
                1 => sums.extend(stream_sums),
                _ => sums.push(Tensor::cat(stream_sums, 0)),
            }
            outputs.push(tokens);
        }
        StageOutput { streams: outputs, sums: cx.sets.sums(sums) }
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
        let mut parts: Vec<(Vec<ColumnStep>, usize)> = Vec::new();
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
        if parts.len() < 2 {
            return None;
        }
        let mut units: Vec<Box<dyn Unit>> = Vec::with_capacity(parts.len());
        for (index, (steps, _)) in parts.into_iter().enumerate() {
            let name = part_name(&self.branch.name, index);
            let stages = split_into_stages(steps);
            units.push(Box::new(Self { branch: Arc::clone(&self.branch), name, stages }));
        }
        Some(units)
    }

    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let mut costs = Vec::with_capacity(groups.len());
        let mut outputs = Vec::with_capacity(groups.len());
        for group in groups {
            let mut shapes = Shapes::new(*group);
            let mut cost = Cost::default();
            let mut ends_branch = false;
            for step in self.stages.iter().flatten() {
                cost = cost + shapes.apply_step(&self.branch, step);
                ends_branch |= step.is_last && step.product == Product::Layer(self.branch.last());
            }
            costs.push(cost);
            outputs.push(if !ends_branch {
                shapes.between_parts()
            } else if self.branch.pools {
                shapes.x.pooled()
            } else {
                GroupShape { intermediates: None, ..shapes.x }
            });
        }
        (costs.into_iter().sum(), outputs)
    }
}
