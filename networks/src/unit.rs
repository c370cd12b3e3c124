//! The unit of sharding: a part of a network whose parameters live in one flat buffer.
//!
//! A unit owns no tensor. It declares its parameters ([`Unit::params`]) and computes tokens
//! from them ([`Unit::forward`]); the parameters come as [`Leaves`], slices of a gathered flat
//! buffer. The three passes of a step therefore share one piece of code:
//!
//! ```text
//! any other network   y = f(slices of θ, x)
//! trained, forwards   y = f(slices of θ_T, x)                         x is kept
//! trained, backwards  y = f(leaves of θ_T, leaf x);  (y · g).sum().backward()
//!                     gives the gradient of x, which is the next g, and of every parameter
//! ```
//!
//! **Stages** are the points of synchronization. A unit that needs statistics over the whole batch
//! has several: each stage returns local sums, and the next one gets their totals over all slices,
//! micro-batches and ranks. The totals are autodiff leaves like the input, so that gradients flow
//! through them.
//!
//! Everything random inside a unit is an argument ([`Draws`]), so that the second forward pass
//! equals the first. `conformance::units` checks every unit for all of this.
//!
//! Parameters are addressed by name and are not fields of a Burn module, because the flat buffer is
//! their only copy: a module would be a second one to keep in sync. Layout, sharding, optimizer,
//! checkpoints and exports all read the same list of parameters.

use std::iter::Sum;
use std::ops::{Add, Mul};

use burn_tensor::{DType, Tensor};
use kernels::ops::{add_term, cast, in_f32};

use crate::draws::{DrawRules, Draws};
use crate::layout::UnitLayout;
use crate::leaves::Leaves;
use crate::params::ParamSpec;
use crate::tokens::Tokens;

/// A part of a network.
pub trait Unit: Send + Sync {
    /// Returns the name of the unit within its network, which prefixes its parameters in exports:
    /// `blocks.3`; of a part of a divided unit, that name and an index: `blocks.3/1`.
    fn name(&self) -> &str;

    /// Returns the parameters, with names relative to the unit.
    fn params(&self) -> Vec<ParamSpec>;

    /// Returns the number of stages; all but the last return sums.
    fn n_stages(&self) -> usize {
        1
    }

    /// Runs stage `stage` on streams of tokens, which together have the groups of all sizes of
    /// views in their order. The first unit gets one stream for each size, and may pack them into
    /// one.
    fn forward(&self, stage: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput;

    /// Returns the rules by which random numbers of the unit are drawn in training.
    fn draw_rules(&self) -> DrawRules {
        DrawRules::default()
    }

    /// Returns the cost of the forward pass for one image with views of these shapes, and the
    /// shapes of the output.
    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>);

    /// Returns new values of running parameters, by name, from the totals that each stage but the
    /// first received. Called once per step.
    fn observe(&self, totals: &[Vec<Tensor<1>>], cx: &Context<'_>) -> Vec<(String, Tensor<1>)> {
        let _ = (totals, cx);
        Vec::new()
    }

    /// Returns new values of parameters before a step, by name, if a method keeps them on a surface
    /// such as the sphere. The optimizer starts from these values. Moving averages of the network
    /// average them without such a correction. The names are those of parameters that are
    /// [`ParamSpec::is_constrained`].
    fn constrain(&self, leaves: &Leaves<'_>) -> Vec<(String, Tensor<1>)> {
        let _ = leaves;
        Vec::new()
    }

    /// Returns the unit that computes one of `n_parts` equal parts of the columns of the output,
    /// with the rows of each parameter that belong to it; `None` if the columns do not divide into
    /// these parts, or a parameter does not have one row for each column.
    fn column_part(&self, n_parts: usize) -> Option<Box<dyn Unit>> {
        let _ = n_parts;
        None
    }

    /// Returns units that compute the same, one after another, each with at most `max_numel`
    /// elements of parameters where that is possible; `None` for a unit that is not divided. The
    /// first takes what this unit takes, and the last returns what it returns.
    fn parts(&self, max_numel: usize) -> Option<Vec<Box<dyn Unit>>> {
        let _ = max_numel;
        None
    }

    /// Returns the attention weights of the first token of each sequence on all tokens within the
    /// unit, `[S, H, P + N]`, for sequences of equal lengths; `None` for a unit without attention.
    fn class_attention(&self, tokens: &Tokens, cx: &Context<'_>) -> Option<Tensor<3>> {
        let _ = (tokens, cx);
        None
    }
}

impl dyn Unit + '_ {
    /// Returns the layout of the unit's flat buffer over a shard group of `group_size` ranks.
    pub fn layout(&self, group_size: usize) -> UnitLayout {
        UnitLayout::new(self.name(), self.params(), group_size)
    }

    /// Returns the layout of the unit's flat buffer if ranks compute `n_parts` parts of the columns
    /// of the output.
    pub fn layout_by_columns(&self, n_parts: usize, group_size: usize) -> UnitLayout {
        UnitLayout::by_columns(self.name(), self.params(), n_parts, group_size)
    }
}

/// Inputs of a unit other than its features.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// Parameters of the unit.
    pub leaves: &'a Leaves<'a>,
    /// Random numbers drawn for the step.
    pub draws: &'a Draws,
    /// Totals of the sums of the previous stage, by set of statistics; empty for the first stage
    /// and in evaluation.
    pub totals: &'a [Tensor<1>],
    /// Sets of statistics that groups share.
    pub sets: &'a StatSets,
    /// Types of numbers.
    pub types: Types,
}

/// Types of numbers in a backbone, f32 or bf16. All other numbers are f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Types {
    /// Type in which matrix products are computed.
    pub products: DType,
    /// Type in which a convolutional network with batch normalization holds its maps, between
    /// operations and between units.
    pub maps: DType,
}

impl Types {
    /// f32 for all numbers.
    pub const F32: Self = Self::all(DType::F32);

    /// Returns `dtype` for all numbers that may have it.
    pub const fn all(dtype: DType) -> Self {
        Self { products: dtype, maps: dtype }
    }
}

impl Context<'_> {
    /// Returns weight and bias of the linear layer `name`.
    pub(crate) fn linear_params(&self, name: &str) -> (Tensor<2>, Tensor<1>) {
        (self.leaves.stored(&format!("{name}.weight")), self.leaves.bias(&format!("{name}.bias")))
    }

    /// Casts `x` to the type in which matrix products are computed.
    pub fn rounded<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        cast(x, self.types.products)
    }

    /// Casts `x` to the type in which a convolutional network holds its maps; f64, in which tests
    /// compute, is kept.
    pub fn as_map<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        if self.types.maps == DType::BF16 { cast(x, DType::BF16) } else { in_f32(x) }
    }
}

/// Output of a stage.
pub struct StageOutput {
    /// Streams of tokens.
    pub streams: Vec<Tokens>,
    /// Local sums by set of statistics, for the next stage; empty for the last stage.
    pub sums: Vec<Tensor<1>>,
}

impl From<Vec<Tokens>> for StageOutput {
    fn from(streams: Vec<Tokens>) -> Self {
        Self { streams, sums: Vec::new() }
    }
}

/// Sets of statistics over the batch that groups of views share: by group, the index of its set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatSets(pub Vec<usize>);

impl StatSets {
    /// Creates one set for each size of views.
    pub fn per_size(n_groups: usize) -> Self {
        Self((0..n_groups).collect())
    }

    /// Creates one set for all sizes of views.
    pub fn joint(n_groups: usize) -> Self {
        Self(vec![0; n_groups])
    }

    /// Selects the sets of the sizes of views with these indices, renumbered from zero.
    pub fn select(&self, sizes: &[usize]) -> Self {
        let sets: Vec<usize> = sizes.iter().map(|size| self.0[*size]).collect();
        let mut distinct = sets.clone();
        distinct.sort_unstable();
        distinct.dedup();
        // Every one of the sets is among the distinct ones.
        Self(sets.iter().map(|set| distinct.partition_point(|other| other < set)).collect())
    }

    /// Returns the sum over the groups of each set, given the sums of each group.
    pub fn sums(&self, group_sums: Vec<Tensor<1>>) -> Vec<Tensor<1>> {
        let n_sets = self.0.iter().max().map_or(0, |last| last + 1);
        let mut sums: Vec<Option<Tensor<1>>> = vec![None; n_sets];
        for (group_sum, set) in group_sums.into_iter().zip(&self.0) {
            sums[*set] = Some(add_term(sums[*set].take(), group_sum));
        }
        sums.into_iter().flatten().collect()
    }
}

/// Dimensions of the features of one image's views of one size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupShape {
    /// Number of views of the image.
    pub n_views: usize,
    /// Number of prefix tokens, which have no position in the grid.
    pub n_prefix: usize,
    /// Rows and columns of the grid.
    pub grid: [usize; 2],
    /// Expected number of cells of a view that have no token.
    pub n_dropped: usize,
    /// Channels.
    pub width: usize,
    /// Expected number of masked cells of all views.
    pub n_masked: usize,
    /// Number of blocks that the masked cells of a view form.
    pub n_mask_blocks: usize,
    /// Whether branches are dropped for some of the views: in training.
    pub drops: bool,
    /// Whether the features are maps ([`Types::maps`]); all others are f32.
    pub is_map: bool,
    /// Intermediate tensors in addition to the values, between parts of a divided unit.
    pub intermediates: Option<Intermediates>,
}

/// Shapes of the intermediate tensors that a part of a divided unit passes to the parts after it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Intermediates {
    /// Rows and columns of the grid of the skip connection.
    pub skip_grid: [usize; 2],
    /// Channels of the skip connection.
    pub skip_width: usize,
    /// Elements of columns of a product that is not complete.
    pub columns: Elements,
    /// Elements of values and intermediate tensors that the last part has computed; it has received
    /// all others.
    pub computed: Elements,
}

impl GroupShape {
    /// Returns the number of tokens of a view.
    pub fn n_tokens(&self) -> usize {
        self.n_prefix + self.grid[0] * self.grid[1] - self.n_dropped
    }

    /// Returns the number of tokens of all views.
    pub fn n_rows(&self) -> usize {
        self.n_views * self.n_tokens()
    }

    /// Returns the number of elements of all views, by type.
    pub fn elements(&self) -> Elements {
        let n = (self.n_rows() * self.width) as f64;
        if self.is_map { Elements { maps: n, ..Elements::default() } } else { Elements::wide(n) }
    }

    /// Returns the shape with one token per view, in f32.
    pub fn pooled(&self) -> Self {
        Self { n_prefix: 1, grid: [0, 0], n_dropped: 0, is_map: false, intermediates: None, ..*self }
    }

    /// Returns the number of elements of the values and the intermediate tensors of all views, by
    /// type.
    pub fn total_elements(&self) -> Elements {
        let Some(intermediates) = self.intermediates else { return self.elements() };
        let skip = Self { grid: intermediates.skip_grid, width: intermediates.skip_width, ..*self };
        self.elements() + skip.elements() + intermediates.columns
    }

    /// Returns the number of elements of all views that the previous unit has computed, by type.
    pub fn computed_elements(&self) -> Elements {
        match self.intermediates {
            Some(intermediates) => intermediates.computed,
            None => self.elements(),
        }
    }
}

/// Cost of a forward pass for one image.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    /// Multiply-adds of matrix products and convolutions, times two.
    pub flops: f64,
    /// Elements that the graph holds until the backward pass.
    pub graph: Elements,
    /// Elements of gradients within the unit that the backward pass holds at a time, beside the
    /// graph.
    pub inner_gradients: Elements,
    /// Elements in f32 that the loss of the output holds on a GPU alone: a kernel of the CPU does
    /// without them.
    pub loss_elements: f64,
    /// Whether the graph holds the output, from which it computes gradients on a CPU. Otherwise the
    /// gradient at the output may take its place.
    pub holds_output: bool,
}

impl Cost {
    /// Returns the cost of a pass whose graph does not hold its output.
    pub fn new(flops: f64, graph: Elements) -> Self {
        let inner_gradients = Elements::default();
        Self { flops, graph, inner_gradients, loss_elements: 0.0, holds_output: false }
    }
}

/// Numbers of elements in memory, by type.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Elements {
    /// Elements that are f32 in any case.
    pub wide: f64,
    /// Elements of [`Types::products`].
    pub products: f64,
    /// Elements of [`Types::maps`].
    pub maps: f64,
    /// Elements of maps that are copied for products, if products are of another type.
    pub rounded_maps: f64,
    /// Elements that are written and read, but not kept.
    pub passing: f64,
}

impl Elements {
    /// Returns `n` elements that are f32 in any case.
    pub fn wide(n: f64) -> Self {
        Self { wide: n, ..Self::default() }
    }

    /// Returns `n` elements of the type of products.
    pub fn products(n: f64) -> Self {
        Self { products: n, ..Self::default() }
    }

    /// Returns the elements in a unit that computes products in f32.
    pub fn in_f32(self) -> Self {
        Self { wide: self.wide + self.products, products: 0.0, ..self }
    }

    /// Returns the number of elements that are written, without copies.
    pub fn total(&self) -> f64 {
        self.wide + self.products + self.maps + self.passing
    }

    /// Returns the bytes of all kept elements with these types.
    pub fn bytes(&self, types: Types) -> f64 {
        let product_size = types.products.size() as f64;
        let map_size = types.maps.size() as f64;
        let copies = if types.products == types.maps { 0.0 } else { self.rounded_maps * product_size };
        self.wide * DType::F32.size() as f64 + self.products * product_size + self.maps * map_size + copies
    }
}

impl Add for Elements {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            wide: self.wide + other.wide,
            products: self.products + other.products,
            maps: self.maps + other.maps,
            rounded_maps: self.rounded_maps + other.rounded_maps,
            passing: self.passing + other.passing,
        }
    }
}

impl Mul<f64> for Elements {
    type Output = Self;

    fn mul(self, factor: f64) -> Self {
        Self {
            wide: self.wide * factor,
            products: self.products * factor,
            maps: self.maps * factor,
            rounded_maps: self.rounded_maps * factor,
            passing: self.passing * factor,
        }
    }
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            flops: self.flops + other.flops,
            graph: self.graph + other.graph,
            inner_gradients: self.inner_gradients + other.inner_gradients,
            loss_elements: self.loss_elements + other.loss_elements,
            holds_output: self.holds_output || other.holds_output,
        }
    }
}

impl Sum for Cost {
    fn sum<I: Iterator<Item = Self>>(costs: I) -> Self {
        costs.fold(Self::default(), Add::add)
    }
}
