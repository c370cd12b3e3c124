//! Units of convolutional networks: a stem, and residual branches of convolutions with batch normalization.
//!
//! ```text
//! stem:    y = pool(relu(norm(conv(x))))
//! branch:  h₁ = conv₁(x)   h_i = conv_i(e_i(relu(norm(h_{i-1}))))      e excites before the last, or does nothing
//!          y = relu(norm(h_L) + x)      or norm(conv(x)) in the place of x, where grid or width change
//! ```
//!
//! x `[B, H·W, C]` with channels last, in the type of maps ([`crate::unit::Types`]). Every normalization needs statistics over the
//! batch, and so begins a stage. Statistics, and what the normalization and the excitation compute from them, are f32.

use burn_tensor::Tensor;
use kernels::ops::{Window, conv, fork, grid_mean, max_pool, normalize};

use super::excitation::Excitation;
use crate::batch_norm::BatchNorm;
use crate::features::{Features, Skip};
use crate::params::{Init, ParamSpec};
use crate::unit::{Context, Cost, Elements, GroupShape, StageOutput, Unit};

/// A convolution without bias, and the normalization of its output.
#[derive(Debug, Clone)]
pub(super) struct Layer {
    /// Name of the convolution: `conv1`.
    pub conv: String,
    /// Normalization of the output.
    pub norm: BatchNorm,
    /// Input channels; the output channels are the normalization's.
    pub input: usize,
    /// Side of the kernel.
    pub kernel: usize,
    /// Distance between two windows, in cells.
    pub stride: usize,
    /// Number of groups of channels.
    pub groups: usize,
}

impl Layer {
    fn window(&self) -> Window {
        Window { stride: self.stride, padding: self.kernel / 2 }
    }

    fn params(&self) -> Vec<ParamSpec> {
        let (o, k) = (self.norm.width, self.kernel);
        // He et al. 2015, by fan-out.
        let init = Init::Normal((2.0 / (k * k * o) as f32).sqrt());
        let shape = [o, self.input / self.groups, k, k];
        let mut params = vec![ParamSpec::weight(format!("{}.weight", self.conv), shape, init)];
        params.extend(self.norm.params());
        params
    }

    /// Returns the output of the convolution, its grid and its sums.
    fn conv(&self, x: Tensor<3>, grid: [usize; 2], cx: &Context<'_>) -> (Tensor<3>, [usize; 2], Tensor<1>) {
        let weight = cx.leaves.stored::<4>(&format!("{}.weight", self.conv));
        let (h, grid) = conv(cx.rounded(x), grid, weight, self.window());
        let (h, sums) = self.norm.moments(cx.as_map(h), cx);
        (h, grid, sums)
    }

    fn output(&self, shape: GroupShape) -> GroupShape {
        let grid = shape.grid.map(|side| self.window().output(side, self.kernel));
        GroupShape { grid, width: self.norm.width, is_map: true, ..shape }
    }

    /// Returns the cost of the convolution, and of the numbers before and after the normalization.
    fn cost(&self, shape: GroupShape) -> Cost {
        let rows = self.output(shape).n_rows() as f64;
        let taps = (self.kernel * self.kernel * self.input / self.groups) as f64;
        let width = self.norm.width as f64;
        // Pixels are no map.
        let rounded_maps = shape.elements().maps;
        let graph = Elements { maps: 2.0 * rows * width, rounded_maps, ..Elements::default() };
        Cost { flops: 2.0 * rows * taps * width, graph }
    }

    /// Returns the cost of a layer whose normalized output is only added to another, and not kept.
    fn cost_around(&self, shape: GroupShape) -> Cost {
        let cost = self.cost(shape);
        let maps = self.output(shape).elements().maps;
        Cost { graph: Elements { maps: cost.graph.maps - maps, passing: maps, ..cost.graph }, ..cost }
    }
}

/// First unit of a network.
pub(super) struct Stem {
    /// Name of the unit.
    pub name: &'static str,
    /// Only layer of the unit.
    pub layer: Layer,
    /// Appends a max pooling of 3×3 cells with a stride of two.
    pub pools: bool,
}

const POOL_SIDE: usize = 3;
const POOL: Window = Window { stride: 2, padding: 1 };

impl Unit for Stem {
    fn name(&self) -> &str {
        self.name
    }

    fn params(&self) -> Vec<ParamSpec> {
        self.layer.params()
    }

    fn n_stages(&self) -> usize {
        2
    }

    fn forward(&self, stage: usize, groups: Vec<Features>, cx: &Context<'_>) -> StageOutput {
        if stage == 0 {
            let convolved = groups.into_iter().map(|group| {
                let (h, grid, sums) = self.layer.conv(group.x, group.grid, cx);
                (Features::on_grid(h, grid), sums)
            });
            let (features, sums) = convolved.unzip();
            return StageOutput { features, sums: cx.sets.sums(sums) };
        }
        let finish = |(group, set): (Features, &usize)| {
            let affine = self.layer.norm.affine(cx.totals.get(*set).cloned(), cx);
            let (mut y, mut grid) = (normalize(group.x, affine, None, true), group.grid);
            if self.pools {
                (y, grid) = max_pool(y, grid, POOL_SIDE, POOL);
            }
            Features::on_grid(y, grid)
        };
        groups.into_iter().zip(&cx.sets.0).map(finish).collect::<Vec<_>>().into()
    }

    fn observe(&self, totals: &[Vec<Tensor<1>>], cx: &Context<'_>) -> Vec<(String, Tensor<1>)> {
        self.layer.norm.observe(totals.concat(), cx)
    }

    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let pooled = |shape: GroupShape| match self.pools {
            true => GroupShape { grid: shape.grid.map(|side| POOL.output(side, POOL_SIDE)), ..shape },
            false => shape,
        };
        let outputs = groups.iter().map(|group| pooled(self.layer.output(*group)));
        (groups.iter().map(|group| self.layer.cost(*group)).sum(), outputs.collect())
    }
}

/// A residual branch.
pub(super) struct Branch {
    /// Name of the unit.
    pub name: String,
    /// Layers in their order.
    pub layers: Vec<Layer>,
    /// Excitation before the last layer.
    pub excitation: Option<Excitation>,
    /// Layer on the skip connection, if the grid or the width of the input is not that of the output.
    pub shortcut: Option<Layer>,
    /// Averages the cells of the output to one vector per view.
    pub pools: bool,
}

/// Message of the panic if a branch's input is missing from its skip connection.
const NO_SKIP: &str = "a branch's first stage leaves its input for the last";

impl Branch {
    fn last(&self) -> usize {
        self.layers.len() - 1
    }

    /// Returns the normalizations that stage `stage` computes sums for, in the order of the sums.
    fn norms_of(&self, stage: usize) -> impl Iterator<Item = &BatchNorm> {
        let shortcut = self.shortcut.as_ref().filter(|_| stage == self.last());
        std::iter::once(&self.layers[stage]).chain(shortcut).map(|layer| &layer.norm)
    }

    /// Splits the totals of stage `stage`, which follow one another, by normalization.
    fn split_totals(&self, stage: usize, totals: &Tensor<1>) -> Vec<Tensor<1>> {
        let mut start = 0;
        let cut = |norm: &BatchNorm| {
            let range = start..start + norm.n_sums();
            start = range.end;
            totals.clone().slice([range])
        };
        self.norms_of(stage).map(cut).collect()
    }

    /// Applies the convolution of stage `stage`; returns its sums with those of the shortcut.
    fn convolve(&self, stage: usize, group: Features, set: usize, cx: &Context<'_>) -> (Features, Tensor<1>) {
        let (x, skip) = match stage {
            0 => {
                let [x, around] = fork(group.x);
                (x, Skip { x: around, grid: group.grid })
            }
            _ => {
                let totals = cx.totals.get(set).map(|totals| self.split_totals(stage - 1, totals).remove(0));
                let affine = self.layers[stage - 1].norm.affine(totals, cx);
                (normalize(group.x, affine, None, true), group.skip.expect(NO_SKIP))
            }
        };
        let excitation = self.excitation.as_ref().filter(|_| stage == self.last());
        let x = match excitation {
            Some(excitation) => excitation.of(x, cx),
            None => x,
        };
        let (h, grid, sums) = self.layers[stage].conv(x, group.grid, cx);
        let shortcut = self.shortcut.as_ref().filter(|_| stage == self.last());
        let (skip, sums) = match shortcut {
            Some(shortcut) => {
                let (x, grid, around) = shortcut.conv(skip.x, skip.grid, cx);
                (Skip { x, grid }, Tensor::cat(vec![sums, around], 0))
            }
            None => (skip, sums),
        };
        (Features { skip: Some(skip), ..Features::on_grid(h, grid) }, sums)
    }

    /// Applies the last normalization and the skip connection.
    fn finish(&self, group: Features, set: usize, cx: &Context<'_>) -> Features {
        let totals = cx.totals.get(set).map(|totals| self.split_totals(self.last(), totals));
        let of_norm = |i: usize| totals.as_ref().map(|totals| totals[i].clone());
        let around = group.skip.expect(NO_SKIP).x;
        let around = match &self.shortcut {
            Some(shortcut) => normalize(around, shortcut.norm.affine(of_norm(1), cx), None, false),
            None => around,
        };
        let affine = self.layers[self.last()].norm.affine(of_norm(0), cx);
        let y = normalize(group.x, affine, Some(around), true);
        match self.pools {
            true => Features::vectors(grid_mean(y)),
            false => Features::on_grid(y, group.grid),
        }
    }
}

impl Unit for Branch {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<ParamSpec> {
        let layers = self.layers.iter().chain(&self.shortcut).flat_map(Layer::params);
        layers.chain(self.excitation.iter().flat_map(Excitation::params)).collect()
    }

    fn n_stages(&self) -> usize {
        self.layers.len() + 1
    }

    fn forward(&self, stage: usize, groups: Vec<Features>, cx: &Context<'_>) -> StageOutput {
        let with_sets = groups.into_iter().zip(&cx.sets.0);
        if stage == self.layers.len() {
            return with_sets.map(|(group, set)| self.finish(group, *set, cx)).collect::<Vec<_>>().into();
        }
        let (features, sums) = with_sets.map(|(group, set)| self.convolve(stage, group, *set, cx)).unzip();
        StageOutput { features, sums: cx.sets.sums(sums) }
    }

    fn observe(&self, totals: &[Vec<Tensor<1>>], cx: &Context<'_>) -> Vec<(String, Tensor<1>)> {
        let mut observed = Vec::new();
        for (stage, by_set) in totals.iter().enumerate() {
            let split_totals: Vec<_> = by_set.iter().map(|totals| self.split_totals(stage, totals)).collect();
            for (i, norm) in self.norms_of(stage).enumerate() {
                observed.extend(norm.observe(split_totals.iter().map(|parts| parts[i].clone()), cx));
            }
        }
        observed
    }

    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let mut cost: Cost = match &self.shortcut {
            Some(shortcut) => groups.iter().map(|group| shortcut.cost_around(*group)).sum(),
            None => Cost::default(),
        };
        let mut shapes = groups.to_vec();
        for (number, layer) in self.layers.iter().enumerate() {
            let excitation = self.excitation.as_ref().filter(|_| number == self.last());
            let of_group = |shape: &GroupShape| {
                let excited = excitation.map(|excitation| excitation.cost(*shape));
                layer.cost(*shape) + excited.unwrap_or_default()
            };
            cost = cost + shapes.iter().map(of_group).sum();
            shapes = shapes.into_iter().map(|shape| layer.output(shape)).collect();
        }
        if self.pools {
            shapes = shapes.iter().map(GroupShape::pooled).collect();
        }
        (cost, shapes)
    }
}
