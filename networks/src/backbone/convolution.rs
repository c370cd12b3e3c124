//! A convolution with batch normalization, and the first unit of convolutional networks.
//!
//! ```text
//! y = pool(relu(norm(conv(x))))
//! ```
//!
//! x `[B·H·W, C]` with channels last, in the type of maps ([`crate::unit::Types`]). Every
//! normalization needs statistics over the batch, and so begins a stage. Statistics, and what the
//! normalization computes from them, are f32.

use std::ops::Range;

use burn_tensor::Tensor;
use kernels::ops::{Window, conv, max_pool, normalize};

use crate::batch_norm::BatchNorm;
use crate::params::{Init, ParamSpec};
use crate::tokens::Tokens;
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

    /// Returns the weight of the convolution.
    pub(super) fn weight(&self) -> ParamSpec {
        let o = self.norm.width;
        let k = self.kernel;
        // He et al. 2015, by fan-out.
        let init = Init::Normal((2.0 / (k * k * o) as f32).sqrt());
        ParamSpec::weight(format!("{}.weight", self.conv), [o, self.input / self.groups, k, k], init)
    }

    /// Computes the output channels `columns` of the convolution, with the rows of the weight that
    /// `cx` holds for them. Returns them and the output grid.
    pub(super) fn convolve_columns(
        &self,
        x: Tensor<3>,
        grid: [usize; 2],
        columns: &Range<usize>,
        cx: &Context<'_>,
    ) -> (Tensor<3>, [usize; 2]) {
        let [b, n, c] = x.dims();
        // The output channels of a group depend only on the input channels of that group.
        let first_group = columns.start * self.groups / self.norm.width;
        let end_group = columns.end * self.groups / self.norm.width;
        let x = if self.groups > 1 && end_group - first_group < self.groups {
            x.slice([0..b, 0..n, first_group * c / self.groups..end_group * c / self.groups])
        } else {
            x
        };
        let weight = cx.leaves.stored::<4>(&format!("{}.weight", self.conv));
        conv(cx.rounded(x), grid, weight, self.window())
    }

    /// Returns the output of the convolution as a map, and its sums.
    pub(super) fn moments(&self, y: Tensor<2>, cx: &Context<'_>) -> (Tensor<2>, Tensor<1>) {
        self.norm.moments(cx.as_map(y), cx)
    }

    /// Returns the shape of the output.
    pub(super) fn output(&self, shape: GroupShape) -> GroupShape {
        let grid = shape.grid.map(|side| self.window().output(side, self.kernel));
        GroupShape { grid, width: self.norm.width, is_map: true, ..shape }
    }

    /// Returns the cost of the convolution, and of the numbers before and after the normalization.
    pub(super) fn cost(&self, shape: GroupShape) -> Cost {
        let rows = self.output(shape).n_rows() as f64;
        let taps = (self.kernel * self.kernel * self.input / self.groups) as f64;
        let width = self.norm.width as f64;
        // Zero for pixels, which are not a map.
        let rounded_maps = shape.elements().maps;
        let graph = Elements { maps: 2.0 * rows * width, rounded_maps, ..Elements::default() };
        Cost::new(2.0 * rows * taps * width, graph)
    }

    /// Returns the cost of a layer on the skip connection, whose normalized output is only added
    /// to another one, and not kept.
    pub(super) fn shortcut_cost(&self, shape: GroupShape) -> Cost {
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
        let mut params = vec![self.layer.weight()];
        params.extend(self.layer.norm.params());
        params
    }

    fn n_stages(&self) -> usize {
        2
    }

    fn forward(&self, stage: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        let mut outputs = Vec::with_capacity(streams.len());
        if stage == 0 {
            let mut sums = Vec::with_capacity(streams.len());
            for tokens in streams {
                let columns = 0..self.layer.norm.width;
                let (y, grid) =
                    self.layer.convolve_columns(tokens.by_sequence(), tokens.grid(), &columns, cx);
                let maps = Tokens::on_grid(y, grid);
                let (y, stream_sums) = self.layer.moments(maps.x.clone(), cx);
                outputs.push(maps.with(y));
                sums.push(stream_sums);
            }
            return StageOutput { streams: outputs, sums: cx.sets.sums(sums) };
        }
        for (tokens, set) in streams.into_iter().zip(&cx.sets.0) {
            let affine = self.layer.norm.affine(cx.totals.get(*set).cloned(), cx);
            let mut tokens = tokens.with(normalize(tokens.x.clone(), affine, None, true));
            if self.pools {
                let (y, grid) = max_pool(tokens.by_sequence(), tokens.grid(), POOL_SIDE, POOL);
                tokens = Tokens::on_grid(y, grid);
            }
            outputs.push(tokens);
        }
        outputs.into()
    }

    fn observe(&self, totals: &[Vec<Tensor<1>>], cx: &Context<'_>) -> Vec<(String, Tensor<1>)> {
        self.layer.norm.observe(totals.concat(), cx)
    }

    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let cost = groups.iter().map(|group| self.layer.cost(*group)).sum();
        let mut outputs = Vec::with_capacity(groups.len());
        for group in groups {
            let mut output = self.layer.output(*group);
            if self.pools {
                output.grid = output.grid.map(|side| POOL.output(side, POOL_SIDE));
            }
            outputs.push(output);
        }
        (cost, outputs)
    }
}
