//! One stage of a unit forwards and backwards on one slice of a micro-batch.

use burn_tensor::{DType, Tensor};
use kernels::ops::{add_seeds, seed};
use networks::draws::Draws;
use networks::features::Features;
use networks::layout::UnitLayout;
use networks::leaves::{Leaves, ParamGrads};
use networks::unit::{Context, StageOutput, StatSets, Types, Unit};

use super::batch::{FeatureGrads, GroupGrads, Groups};

/// Data kept from a forward pass for the backward pass.
pub(crate) enum StageRecord<'a> {
    /// The input alone; the stage runs again.
    Input(Groups),
    /// The graph from input, totals and parameters to output.
    Graph(Box<Graph<'a>>),
}

impl StageRecord<'_> {
    /// The input, if it was kept alone.
    pub(crate) fn input(&self) -> Option<Groups> {
        match self {
            Self::Input(input) => Some(input.clone()),
            Self::Graph(_) => None,
        }
    }
}

/// A stage's graph.
pub(crate) struct Graph<'a> {
    /// Input leaves, which track a gradient if the input needs one.
    input: Groups,
    /// Leaves of the totals.
    totals: Vec<Tensor<1>>,
    /// Leaves of the parameters.
    leaves: Leaves<'a>,
    /// Tracked output.
    output: StageOutput,
}

/// Arguments of a stage besides its input.
#[derive(Clone, Copy)]
pub(crate) struct StageArguments<'s> {
    /// Number of the stage.
    pub(crate) stage: usize,
    pub(crate) draws: &'s Draws,
    /// Totals of the stage before.
    pub(crate) totals: &'s [Tensor<1>],
    pub(crate) sets: &'s StatSets,
    pub(crate) types: Types,
}

/// Gradients at the outputs of a stage.
pub(crate) struct OutputGrads<'g> {
    pub(crate) features: GroupGrads,
    /// Gradients with respect to the sums: the same for all slices.
    pub(crate) sums: &'g [Tensor<1>],
}

/// Gradients at the inputs of a stage.
pub(crate) struct InputGrads {
    /// Gradient with respect to the input, if requested.
    pub(crate) features: GroupGrads,
    /// Gradients with respect to the totals, by set.
    pub(crate) totals: Vec<Tensor<1>>,
    /// Gradients with respect to the parameters.
    pub(crate) params: ParamGrads,
}

/// A unit with its layout and its gathered parameters.
#[derive(Clone, Copy)]
pub(crate) struct Gathered<'a, 'f> {
    /// Computation of the unit.
    pub(crate) unit: &'a dyn Unit,
    /// Layout of the parameters in the buffer.
    pub(crate) layout: &'a UnitLayout,
    /// All parameters of the unit, `[padded]`.
    pub(crate) flat: &'f Tensor<1>,
    /// The same in bf16, where the update has written both.
    pub(crate) in_bf16: Option<&'f Tensor<1>>,
}

impl<'a> Gathered<'a, '_> {
    /// Returns the parameters for products in `products`; with `track`, their gradients are
    /// tracked.
    fn leaves(&self, track: bool, products: DType) -> Leaves<'a> {
        let leaves = Leaves::for_products(self.layout, self.flat, track, products);
        match self.in_bf16 {
            Some(in_bf16) => leaves.with_copy(in_bf16),
            None => leaves,
        }
    }

    /// Computes the output without a graph.
    pub(crate) fn infer(&self, input: Groups, beside: StageArguments<'_>) -> StageOutput {
        let leaves = self.leaves(false, beside.types.products);
        self.unit.forward(beside.stage, input, &context(&leaves, beside, beside.totals))
    }

    /// Computes the output, and keeps for [`Gathered::backward`] the graph with `keeps_graph`, else
    /// the input.
    pub(crate) fn forward(
        &self,
        input: Groups,
        beside: StageArguments<'_>,
        keeps_graph: bool,
        wants_input: bool,
    ) -> (StageOutput, StageRecord<'a>) {
        if !keeps_graph {
            return (self.infer(input.clone(), beside), StageRecord::Input(input));
        }
        let graph = self.graph(input, beside, wants_input);
        let features = graph.output.features.iter().map(|group| group.map(|x| x.clone().inner())).collect();
        let sums = graph.output.sums.iter().map(|sum| sum.clone().inner()).collect();
        (StageOutput { features, sums }, StageRecord::Graph(Box::new(graph)))
    }

    /// Computes the vector-Jacobian product: gradients at the stage's inputs, from those at its
    /// outputs.
    pub(crate) fn backward(
        &self,
        kept: StageRecord<'a>,
        grads: OutputGrads<'_>,
        beside: StageArguments<'_>,
        wants_input: bool,
    ) -> InputGrads {
        let Graph { input, totals, leaves, output } = match kept {
            StageRecord::Input(input) => self.graph(input, beside, wants_input),
            StageRecord::Graph(graph) => *graph,
        };
        let of_features = output.features.into_iter().zip(grads.features).flat_map(|(group, grad)| {
            let tensors: Vec<Tensor<3>> =
                std::iter::once(&group.x).chain(group.intermediates()).cloned().collect();
            let grads = std::iter::once(grad.x).chain(grad.beside);
            tensors.into_iter().zip(grads).map(|(x, grad)| {
                let dtype = x.dtype();
                seed(x, grad.cast(dtype))
            })
        });
        let of_sums = output.sums.into_iter().zip(grads.sums).map(|(sum, grad)| seed(sum, grad.clone()));
        let start = of_features.chain(of_sums).reduce(add_seeds);
        // A multi-crop without views was refused with the recipe.
        let mut grads = start.expect("a unit has at least one group of views").backward();
        let mut of_leaf =
            |x: &Tensor<3>| x.grad_remove(&mut grads).unwrap_or_else(|| x.clone().inner().zeros_like());
        let mut of_group = |group: &Features| {
            let x = of_leaf(&group.x);
            FeatureGrads { x, beside: group.intermediates().map(&mut of_leaf).collect() }
        };
        let features = if wants_input { input.iter().map(&mut of_group).collect() } else { Vec::new() };
        let totals = totals
            .iter()
            .map(|total| total.grad_remove(&mut grads).unwrap_or_else(|| total.clone().inner().zeros_like()));
        InputGrads { features, totals: totals.collect(), params: leaves.gradients(&mut grads) }
    }

    fn graph(&self, input: Groups, beside: StageArguments<'_>, wants_input: bool) -> Graph<'a> {
        let leaf = |x: Tensor<3>| {
            let x = x.autodiff();
            if wants_input { x.require_grad() } else { x }
        };
        let input: Groups = input.iter().map(|group| group.map(|x| leaf(x.clone()))).collect();
        let totals: Vec<Tensor<1>> =
            beside.totals.iter().map(|total| total.clone().autodiff().require_grad()).collect();
        let leaves = self.leaves(true, beside.types.products);
        let output = self.unit.forward(beside.stage, input.clone(), &context(&leaves, beside, &totals));
        Graph { input, totals, leaves, output }
    }
}

fn context<'c>(leaves: &'c Leaves<'c>, beside: StageArguments<'c>, totals: &'c [Tensor<1>]) -> Context<'c> {
    Context { leaves, draws: beside.draws, totals, sets: beside.sets, types: beside.types }
}
